-- Version 3. Virtual keys, known by their keyed hash only; and the ledger's sums by credential, so that each can be
-- told its own without a look at the entries of the others.

CREATE TABLE virtual_keys (
  digest TEXT PRIMARY KEY,
  uid TEXT NOT NULL,
  name TEXT NOT NULL,
  hint TEXT NOT NULL,
  provider TEXT NOT NULL,
  env TEXT NOT NULL,
  owner TEXT NOT NULL,
  profile TEXT NOT NULL,
  created_at REAL NOT NULL,
  expires_at REAL,
  ends_at REAL,
  ended TEXT NOT NULL,
  last_used REAL
) WITHOUT ROWID;

CREATE TABLE sums (
  credential INTEGER NOT NULL REFERENCES credentials,
  lane TEXT NOT NULL,
  kind TEXT NOT NULL,
  purchases INTEGER NOT NULL,
  unknown INTEGER NOT NULL,
  paid INTEGER NOT NULL,
  would_have_paid INTEGER NOT NULL,
  PRIMARY KEY (credential, lane, kind)
) WITHOUT ROWID;

INSERT INTO sums
SELECT credential, lane, kind, count(*), sum(paid IS NULL), coalesce(sum(paid), 0), coalesce(sum(would_have_paid), 0)
FROM entries GROUP BY credential, lane, kind;

DROP TABLE totals;
