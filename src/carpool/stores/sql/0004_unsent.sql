-- Version 4. Whether the create of a batch is known not to have gone out. Of those made before, nobody knows.

ALTER TABLE batches ADD COLUMN unsent INTEGER NOT NULL DEFAULT 0;
