-- Version 5. Several engines share the work: each account has one leader, and an engine is alive while its pulse lasts,
-- which may be shorter than its lease.

ALTER TABLE engines ADD COLUMN pulse_until REAL NOT NULL DEFAULT 0;

CREATE TABLE leaders (account TEXT PRIMARY KEY, engine TEXT NOT NULL) WITHOUT ROWID;
