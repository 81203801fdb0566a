-- Statements about virtual keys, for PostgreSQL.

-- name: virtual_keys
SELECT digest, uid, name, hint, provider, env, owner, profile, created_at, expires_at, ends_at, ended, last_used
FROM virtual_keys ORDER BY created_at, name COLLATE "C", digest COLLATE "C"

-- name: write_key
INSERT INTO virtual_keys (digest, uid, name, hint, provider, env, owner, profile, created_at, expires_at, ends_at, ended)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (digest) DO UPDATE SET owner = excluded.owner, profile = excluded.profile, expires_at = excluded.expires_at,
  ends_at = excluded.ends_at, ended = excluded.ended

-- name: used_key
UPDATE virtual_keys SET last_used = greatest(coalesce(last_used, 0), :at) WHERE digest = :digest

-- name: keys_version
SELECT CAST(value AS INTEGER) FROM meta WHERE name = 'keys_version'

-- name: next_keys_version
INSERT INTO meta (name, value) VALUES ('keys_version', '1')
ON CONFLICT (name) DO UPDATE SET value = CAST(CAST(meta.value AS INTEGER) + 1 AS TEXT)
