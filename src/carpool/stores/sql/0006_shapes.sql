-- Version 6. The record of calls, in blocks of up to 256: sizes, times and keyed hashes, no content. `until` is when the
-- last call of a block arrived.

CREATE TABLE shapes (
  id INTEGER PRIMARY KEY,
  until REAL NOT NULL,
  calls INTEGER NOT NULL,
  content BLOB NOT NULL
);
