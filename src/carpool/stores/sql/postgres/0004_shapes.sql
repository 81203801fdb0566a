-- oldest: 1
-- Version 4. The record of calls, in blocks of up to 256: sizes, times and keyed hashes, no content. `until` is when the
-- last call of a block arrived.

CREATE TABLE shapes (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  until double precision NOT NULL,
  calls bigint NOT NULL,
  content bytea NOT NULL
);
