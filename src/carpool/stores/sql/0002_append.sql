-- Version 2. A batch's results come in any order, so whatever is written once per call is appended instead of put into
-- its place, and what is changed once per call is kept small: both decide how many pages a settled chunk touches.

CREATE TABLE words (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);  -- models and reasons: few, and said often

INSERT OR IGNORE INTO words (text) SELECT model FROM calls UNION SELECT reason FROM calls;

ALTER TABLE calls RENAME TO old_calls;
ALTER TABLE outcomes RENAME TO old_outcomes;
ALTER TABLE entries RENAME TO old_entries;

CREATE TABLE calls (
  id INTEGER PRIMARY KEY,               -- the ticket
  pool INTEGER NOT NULL REFERENCES pools,
  credential INTEGER NOT NULL REFERENCES credentials,
  state TEXT NOT NULL,
  lane TEXT NOT NULL,
  batch INTEGER REFERENCES batches,
  arrived REAL NOT NULL,
  deadline REAL,
  rescue_at REAL NOT NULL,
  bytes INTEGER NOT NULL,
  fingerprint INTEGER NOT NULL,
  key TEXT,
  awaiter TEXT,                         -- the engine whose door holds the client
  sender TEXT,                          -- the engine behind the attempt on `now`
  stream INTEGER NOT NULL,
  max_output_tokens INTEGER NOT NULL,
  model INTEGER NOT NULL REFERENCES words,
  reason INTEGER NOT NULL REFERENCES words,
  tags TEXT,
  requeues INTEGER NOT NULL DEFAULT 0,
  outcome INTEGER REFERENCES outcomes,
  settled_at REAL,
  delivered_at REAL
);

CREATE TABLE outcomes (
  id INTEGER PRIMARY KEY,
  ticket INTEGER NOT NULL,
  purchase INTEGER,                     -- the purchase that gave the answer, where there was one
  kind TEXT NOT NULL,
  status INTEGER NOT NULL,
  at REAL NOT NULL,
  lane TEXT NOT NULL,
  reason TEXT NOT NULL,
  headers TEXT NOT NULL,
  batch TEXT,
  body BLOB NOT NULL
);

CREATE TABLE entries (
  ticket INTEGER NOT NULL,
  purchase INTEGER NOT NULL,            -- the batch's id, or minus the number of the attempt on `now`
  at REAL NOT NULL,
  lane TEXT NOT NULL,
  kind TEXT NOT NULL,
  provider TEXT NOT NULL,
  credential INTEGER NOT NULL REFERENCES credentials,
  model TEXT NOT NULL,
  usage TEXT,
  paid INTEGER,
  would_have_paid INTEGER,
  reason TEXT NOT NULL,
  tags TEXT
);

INSERT INTO outcomes (ticket, purchase, kind, status, at, lane, reason, headers, batch, body)
SELECT ticket, purchase, kind, status, at, lane, reason, headers, batch, body FROM old_outcomes ORDER BY at, ticket;

CREATE TEMP TABLE places AS SELECT ticket, id FROM outcomes;
CREATE UNIQUE INDEX temp.places_ticket ON places (ticket);

INSERT INTO calls
SELECT c.id, pool, credential, state, lane, batch, arrived, deadline, rescue_at, bytes, fingerprint, key, awaiter, sender,
  stream, max_output_tokens, m.id, r.id, tags, requeues, p.id, settled_at, delivered_at
FROM old_calls c JOIN words m ON m.text = c.model JOIN words r ON r.text = c.reason
LEFT JOIN temp.places p ON p.ticket = c.id
ORDER BY c.id;

INSERT INTO entries SELECT * FROM old_entries ORDER BY at, ticket;

DROP TABLE temp.places;
DROP TABLE old_calls;
DROP TABLE old_outcomes;
DROP TABLE old_entries;

CREATE UNIQUE INDEX calls_key ON calls (credential, key) WHERE key IS NOT NULL;
CREATE INDEX calls_queued ON calls (pool, lane, rescue_at, arrived, id, bytes) WHERE state = 'queued';
CREATE INDEX calls_due ON calls (credential, rescue_at)
  WHERE state IN ('queued', 'boarded') AND rescue_at < 9e999 AND (awaiter IS NOT NULL OR lane = 'now');
CREATE INDEX calls_batch ON calls (batch) WHERE batch IS NOT NULL;
CREATE INDEX calls_boarded ON calls (batch) WHERE state = 'boarded';
CREATE INDEX calls_adoptable ON calls (fingerprint, arrived) WHERE delivered_at IS NULL AND awaiter IS NULL;
CREATE INDEX calls_delivered ON calls (fingerprint, delivered_at) WHERE delivered_at IS NOT NULL;
CREATE INDEX calls_sending ON calls (sender) WHERE state = 'sending';
CREATE INDEX calls_done ON calls (delivered_at) WHERE state = 'settled' AND delivered_at IS NOT NULL;
CREATE INDEX calls_unclaimed ON calls (settled_at) WHERE state = 'settled' AND delivered_at IS NULL;
CREATE UNIQUE INDEX entries_identity ON entries (ticket, purchase);
