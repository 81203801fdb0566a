-- oldest: 1
-- Version 3. A connection that is gone is told from one of an earlier server, and who lost it is given time to come back:
-- `backend_since` and `server_since` are when the server's process behind an engine, and that server, began; `pulse` is
-- for how many seconds the engine says that it lives; `missed_at` is when its connection was first found to be gone.

ALTER TABLE engines ADD COLUMN backend_since timestamptz;
ALTER TABLE engines ADD COLUMN server_since timestamptz;
ALTER TABLE engines ADD COLUMN pulse double precision;
ALTER TABLE engines ADD COLUMN missed_at timestamptz;

-- Which of an engine's calls equal one that has come: the shorter index was of no more use.
CREATE INDEX calls_awaited_equal ON calls (awaiter, fingerprint) WHERE awaiter IS NOT NULL;
DROP INDEX calls_awaited;
