-- Version 1. Times are epoch seconds; a call without a rescue time has an infinite one, so that order needs no NULLs.
-- Partial indexes keep the paths of the engine short however many settled calls are kept. What many processes would
-- count in one row, and so wait for each other, is counted in shards.

CREATE TABLE credentials (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE);

-- Models and reasons: few, and said often. An index holds no long text, so their digests are in it.
CREATE TABLE words (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, text text NOT NULL);
CREATE UNIQUE INDEX words_text ON words (md5(text));

CREATE TABLE pools (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  credential bigint NOT NULL REFERENCES credentials,
  provider text NOT NULL,
  dialect text NOT NULL,
  endpoint text NOT NULL,
  headers text NOT NULL,
  model text NOT NULL,
  size_class text NOT NULL,
  deadline_class text NOT NULL
);
CREATE UNIQUE INDEX pools_key ON pools (
  credential, provider, dialect, md5(endpoint), md5(headers), md5(model), size_class, deadline_class
);

CREATE TABLE batches (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  pool bigint NOT NULL,
  credential bigint NOT NULL,
  nonce text NOT NULL,
  state text NOT NULL,
  owner text NOT NULL,
  count bigint NOT NULL,
  bytes bigint NOT NULL,
  intended_at float8 NOT NULL,
  sent_at float8,
  resolved_at float8,
  provider_id text,
  expires_at float8,
  ended_at float8,
  clock_offset float8 NOT NULL DEFAULT 0,
  abandoned boolean NOT NULL DEFAULT false,
  note text NOT NULL DEFAULT '',
  unsent boolean NOT NULL DEFAULT false
);
CREATE INDEX batches_unfinished ON batches (owner, id) WHERE state NOT IN ('collected', 'refused', 'void', 'lost');
CREATE INDEX batches_bought ON batches (credential) WHERE provider_id IS NOT NULL;
CREATE INDEX batches_state ON batches (state);

CREATE TABLE calls (
  id bigint PRIMARY KEY,                -- the ticket
  pool bigint NOT NULL,
  credential bigint NOT NULL,
  batch bigint,
  arrived float8 NOT NULL,
  deadline float8,
  rescue_at float8 NOT NULL,
  bytes bigint NOT NULL,
  fingerprint bigint NOT NULL,
  max_output_tokens bigint NOT NULL,
  model bigint NOT NULL,
  reason bigint NOT NULL,
  settled_at float8,
  delivered_at float8,
  requeues integer NOT NULL DEFAULT 0,
  stream boolean NOT NULL,
  state text NOT NULL,
  lane text NOT NULL,
  awaiter text,                         -- the engine whose door holds the client
  sender text,                          -- the engine behind the attempt on `now`
  key text,
  tags text
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);

CREATE UNIQUE INDEX calls_key ON calls (credential, md5(key)) WHERE key IS NOT NULL;
CREATE INDEX calls_queued ON calls (pool, lane, rescue_at, arrived, id) WHERE state = 'queued';
CREATE INDEX calls_due ON calls (credential, rescue_at)
  WHERE state IN ('queued', 'boarded') AND rescue_at < 'Infinity' AND (awaiter IS NOT NULL OR lane = 'now');
CREATE INDEX calls_batch ON calls (batch, id) WHERE batch IS NOT NULL;
CREATE INDEX calls_aboard ON calls (batch) WHERE state IN ('boarded', 'sending') AND batch IS NOT NULL;
CREATE INDEX calls_sending ON calls (sender) WHERE state = 'sending';
CREATE INDEX calls_awaited ON calls (awaiter) WHERE awaiter IS NOT NULL;
CREATE INDEX calls_adoptable ON calls (fingerprint) WHERE delivered_at IS NULL AND awaiter IS NULL;
CREATE INDEX calls_delivered ON calls (fingerprint, delivered_at) WHERE delivered_at IS NOT NULL;
CREATE INDEX calls_done ON calls (delivered_at) WHERE state = 'settled' AND delivered_at IS NOT NULL;
CREATE INDEX calls_unclaimed ON calls (settled_at) WHERE state = 'settled' AND delivered_at IS NULL;

-- To pack a body takes longer than to write it, and so does putting a short one aside.
CREATE TABLE bodies (ticket bigint PRIMARY KEY, body bytea NOT NULL)
  WITH (autovacuum_vacuum_scale_factor = 0.05, toast_tuple_target = 8160);
ALTER TABLE bodies ALTER body SET STORAGE EXTERNAL;

CREATE TABLE outcomes (
  ticket bigint PRIMARY KEY,
  purchase bigint,                      -- the purchase that gave the answer, where there was one
  kind text NOT NULL,
  status bigint NOT NULL,
  at float8 NOT NULL,
  lane text NOT NULL,
  reason text NOT NULL,
  headers text NOT NULL,
  batch text,
  body bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05, toast_tuple_target = 8160);
ALTER TABLE outcomes ALTER body SET STORAGE EXTERNAL;

CREATE TABLE suspects (
  batch bigint NOT NULL,
  provider_id text NOT NULL,
  credential bigint NOT NULL,
  verdict text NOT NULL,
  PRIMARY KEY (batch, provider_id)
);

CREATE TABLE entries (
  ticket bigint NOT NULL,
  purchase bigint NOT NULL,             -- the batch's id, or minus the number of the attempt on `now`
  at float8 NOT NULL,
  credential bigint NOT NULL,
  paid bigint,
  would_have_paid bigint,
  lane text NOT NULL,
  kind text NOT NULL,
  provider text NOT NULL,
  model text NOT NULL,
  usage text,
  reason text NOT NULL,
  tags text,
  PRIMARY KEY (ticket, purchase)
);

-- The ledger summed up, changed in the same transaction as its entries: reading it never scans them.
CREATE TABLE sums (
  shard integer NOT NULL,
  credential bigint NOT NULL,
  lane text NOT NULL,
  kind text NOT NULL,
  purchases bigint NOT NULL,
  unknown bigint NOT NULL,
  paid bigint NOT NULL,
  would_have_paid bigint NOT NULL,
  PRIMARY KEY (shard, credential, lane, kind)
) WITH (fillfactor = 50);

CREATE TABLE tallies (
  shard integer NOT NULL, name text NOT NULL, count bigint NOT NULL, PRIMARY KEY (shard, name)
) WITH (fillfactor = 50);

-- `skew`: this clock minus the engine's own when it joined.
CREATE TABLE engines (
  name text PRIMARY KEY,
  lease_until float8 NOT NULL,
  pulse_until float8 NOT NULL,
  skew float8 NOT NULL
);

CREATE TABLE leaders (account text PRIMARY KEY, engine text NOT NULL);

CREATE TABLE memos (
  kind text NOT NULL,
  key text NOT NULL,
  value text NOT NULL,
  at float8 NOT NULL,
  PRIMARY KEY (kind, key)
);

CREATE TABLE virtual_keys (
  digest text PRIMARY KEY,
  uid text NOT NULL,
  name text NOT NULL,
  hint text NOT NULL,
  provider text NOT NULL,
  env text NOT NULL,
  owner text NOT NULL,
  profile text NOT NULL,
  created_at float8 NOT NULL,
  expires_at float8,
  ends_at float8,
  ended text NOT NULL,
  last_used float8
);
