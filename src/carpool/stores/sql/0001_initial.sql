-- Version 1. Times are epoch seconds; a call without a rescue time has an infinite one, so that order needs no NULLs.
-- Partial indexes keep the paths of the engine short however many settled calls are kept.

CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE credentials (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);

CREATE TABLE pools (
  id INTEGER PRIMARY KEY,
  credential INTEGER NOT NULL REFERENCES credentials,
  provider TEXT NOT NULL,
  dialect TEXT NOT NULL,
  endpoint TEXT NOT NULL,
  headers TEXT NOT NULL,
  model TEXT NOT NULL,
  size_class TEXT NOT NULL,
  deadline_class TEXT NOT NULL,
  UNIQUE (credential, provider, dialect, endpoint, headers, model, size_class, deadline_class)
);

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
  model TEXT NOT NULL,
  reason TEXT NOT NULL,
  tags TEXT,
  requeues INTEGER NOT NULL DEFAULT 0,
  settled_at REAL,
  delivered_at REAL
);

CREATE UNIQUE INDEX calls_key ON calls (credential, key) WHERE key IS NOT NULL;
CREATE INDEX calls_open ON calls (state, pool, lane, rescue_at, arrived, id, bytes) WHERE state <> 'settled';
CREATE INDEX calls_due ON calls (credential, rescue_at)
  WHERE state IN ('queued', 'boarded') AND rescue_at < 9e999 AND (awaiter IS NOT NULL OR lane = 'now');
CREATE INDEX calls_batch ON calls (batch) WHERE batch IS NOT NULL;
CREATE INDEX calls_aboard ON calls (batch, state, rescue_at, awaiter) WHERE batch IS NOT NULL AND state <> 'settled';
CREATE INDEX calls_adoptable ON calls (fingerprint, arrived) WHERE delivered_at IS NULL AND awaiter IS NULL;
CREATE INDEX calls_delivered ON calls (fingerprint, delivered_at) WHERE delivered_at IS NOT NULL;
CREATE INDEX calls_awaited ON calls (awaiter) WHERE awaiter IS NOT NULL;
CREATE INDEX calls_sending ON calls (sender) WHERE state = 'sending';
CREATE INDEX calls_done ON calls (delivered_at) WHERE state = 'settled' AND delivered_at IS NOT NULL;
CREATE INDEX calls_unclaimed ON calls (settled_at) WHERE state = 'settled' AND delivered_at IS NULL;

CREATE TABLE bodies (ticket INTEGER PRIMARY KEY, body BLOB NOT NULL);

CREATE TABLE outcomes (
  ticket INTEGER PRIMARY KEY,
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

CREATE TABLE batches (
  id INTEGER PRIMARY KEY,
  pool INTEGER NOT NULL REFERENCES pools,
  credential INTEGER NOT NULL REFERENCES credentials,
  nonce TEXT NOT NULL,
  state TEXT NOT NULL,
  owner TEXT NOT NULL,
  count INTEGER NOT NULL,
  bytes INTEGER NOT NULL,
  intended_at REAL NOT NULL,
  sent_at REAL,
  resolved_at REAL,
  provider_id TEXT,
  expires_at REAL,
  ended_at REAL,
  clock_offset REAL NOT NULL DEFAULT 0,
  abandoned INTEGER NOT NULL DEFAULT 0,
  note TEXT NOT NULL DEFAULT ''
);

CREATE INDEX batches_unfinished ON batches (owner, id, credential, state)
  WHERE state NOT IN ('collected', 'refused', 'void', 'lost');
CREATE INDEX batches_bought ON batches (credential, provider_id) WHERE provider_id IS NOT NULL;
CREATE INDEX batches_state ON batches (state);

CREATE TABLE suspects (
  batch INTEGER NOT NULL REFERENCES batches,
  provider_id TEXT NOT NULL,
  credential INTEGER NOT NULL REFERENCES credentials,
  verdict TEXT NOT NULL,
  PRIMARY KEY (batch, provider_id)
) WITHOUT ROWID;

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
  tags TEXT,
  PRIMARY KEY (ticket, purchase)
) WITHOUT ROWID;

-- The ledger summed up, changed in the same transaction as its entries: reading it never scans them.
CREATE TABLE totals (
  lane TEXT NOT NULL,
  kind TEXT NOT NULL,
  purchases INTEGER NOT NULL,
  unknown INTEGER NOT NULL,
  paid INTEGER NOT NULL,
  would_have_paid INTEGER NOT NULL,
  PRIMARY KEY (lane, kind)
) WITHOUT ROWID;

CREATE TABLE tallies (name TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE engines (name TEXT PRIMARY KEY, lease_until REAL NOT NULL) WITHOUT ROWID;

CREATE TABLE memos (
  kind TEXT NOT NULL,
  key TEXT NOT NULL,
  value TEXT NOT NULL,
  at REAL NOT NULL,
  PRIMARY KEY (kind, key)
) WITHOUT ROWID;
