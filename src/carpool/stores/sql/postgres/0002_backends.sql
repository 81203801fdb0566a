-- oldest: 1
-- Version 2. An engine is known by the server's process at the other end of its connection: when that is gone, so is the
-- engine, and nobody need wait until its pulse stops.

ALTER TABLE engines ADD COLUMN backend integer;
