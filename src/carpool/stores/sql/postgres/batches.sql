-- Statements about engines and batches, for PostgreSQL. Leases and pulses last on the database's clock.

-- Only one transaction at a time decides succession, so that its view of live engines includes all that joined before.
-- name: alone
SELECT pg_advisory_xact_lock(hashtextextended('carpool engines ' || current_schema(), 0))

-- name: join
INSERT INTO engines (name, lease_until, pulse_until, skew, pulse)
VALUES (:engine, {clock} + :ttl, {clock} + :pulse, {clock} - :now, :pulse)
ON CONFLICT (name) DO UPDATE SET lease_until = excluded.lease_until, pulse_until = excluded.pulse_until,
  skew = excluded.skew, pulse = excluded.pulse

-- The pid of a backend process may be reused, so its start time is part of its identity.
-- name: sign_in
UPDATE engines SET backend = pg_backend_pid(), server_since = pg_postmaster_start_time(), missed_at = NULL,
  backend_since = (SELECT backend_start FROM pg_stat_get_activity(pg_backend_pid()))
WHERE name = {names ?}

-- Engines whose connection is gone, whether that is new, and whether they count as dead by now.
-- name: missing
SELECT name, missed_at IS NULL, {dead} FROM engines WHERE {missing}

-- After a restart or a fail-over all connections are gone, and many pulses may have expired meanwhile. That proves
-- nothing about any engine, so each gets the time of one pulse to reconnect.
-- name: miss
UPDATE engines SET missed_at = clock_timestamp(),
  pulse_until = CASE WHEN server_since = pg_postmaster_start_time() THEN pulse_until
                     ELSE greatest(pulse_until, {database_clock} + coalesce(pulse, 0)) END
WHERE missed_at IS NULL AND {missing}

-- name: mark_dead_engines
UPDATE engines SET pulse_until = 0 WHERE {missing} AND {dead}
RETURNING name

-- name: alive
SELECT 1 FROM engines WHERE name = :engine AND pulse_until >= {clock}

-- name: lead
INSERT INTO leaders (account, engine)
SELECT DISTINCT account, :engine FROM json_array_elements_text(:accounts::json) account ORDER BY account
ON CONFLICT (account) DO UPDATE SET engine = excluded.engine WHERE leaders.engine NOT IN {live}

-- name: led
SELECT account FROM leaders
WHERE engine = :engine AND account = {names :accounts}

-- name: leaders
SELECT account, engine FROM leaders WHERE engine IN {live}

-- name: leads
SELECT 1 FROM leaders WHERE account = :account AND engine = :engine AND engine IN {live} FOR SHARE

-- name: resign
DELETE FROM leaders WHERE engine = ?

-- name: leave
DELETE FROM engines WHERE name = ?

-- name: forget_engines
DELETE FROM engines WHERE lease_until < :before AND pulse_until < :before

-- name: take_batches
UPDATE batches SET owner = :engine,
  resolved_at = CASE WHEN state = 'submitting' AND NOT unsent
    THEN greatest(:now, coalesce((SELECT :now + lease_until - {clock} FROM engines WHERE name = batches.owner), :now))
    ELSE resolved_at END,
  state = CASE WHEN state = 'submitting' AND NOT unsent THEN 'unknown' ELSE state END
WHERE state NOT IN ({finished})
  AND owner NOT IN {live}
  AND credential = {numbers :credentials}

-- A call in `sending` is an orphan if the engine that sends it, or else the one that awaits it, is not alive. On lane
-- `now` it stays in `sending`, but an engine that comes back later is no longer its sender.
-- name: return_orphans
UPDATE calls SET
  state = CASE WHEN {in_unfinished_batch} THEN 'boarded' WHEN lane = 'batch' THEN 'queued' ELSE state END,
  batch = CASE WHEN {in_unfinished_batch} THEN batch END,
  sender = NULL
WHERE id IN (
  SELECT id FROM calls WHERE state {from return_orphans} AND (lane = 'batch' OR sender IS NOT NULL) AND {orphan} ORDER BY id
  FOR NO KEY UPDATE
)

-- Skips from name to name along the index: as many steps as there are distinct names.
-- name: departed
WITH RECURSIVE found (name) AS (
  SELECT min(awaiter) FROM calls WHERE awaiter IS NOT NULL
  UNION ALL
  SELECT (SELECT min(awaiter) FROM calls WHERE awaiter IS NOT NULL AND awaiter > found.name)
  FROM found WHERE found.name IS NOT NULL
)
SELECT name FROM found WHERE name IS NOT NULL AND name NOT IN {live}

-- name: forget_awaiters
UPDATE calls SET awaiter = NULL
WHERE id IN (
  SELECT id FROM calls WHERE awaiter = {names :dead} ORDER BY id
  FOR NO KEY UPDATE
)

-- name: insert_batch
INSERT INTO batches (pool, credential, nonce, state, owner, count, bytes, intended_at, unsent)
SELECT id, credential, :nonce, 'submitting', :owner, 0, 0, :at, :unsent FROM pools WHERE id = :pool
RETURNING id

-- name: anything_waiting
SELECT 1 FROM calls
WHERE state = 'queued' AND pool = :pool AND lane = 'batch'
  AND (rescue_at > :at OR awaiter IS NULL)
LIMIT 1

-- name: claim
UPDATE calls SET state = 'boarded', batch = :batch
WHERE state {from claim} AND id IN (
  SELECT id FROM (
    SELECT id, row_number() OVER pressing AS place, sum(bytes) OVER pressing AS total
    FROM (
      SELECT id, bytes, rescue_at, arrived FROM calls
      WHERE state {from claim} AND pool = :pool AND lane = 'batch'
        AND (rescue_at > :at OR awaiter IS NULL)
      ORDER BY rescue_at, arrived, id LIMIT :max_count FOR NO KEY UPDATE SKIP LOCKED
    ) waiting
    WINDOW pressing AS (ORDER BY rescue_at, arrived, id ROWS UNBOUNDED PRECEDING)
  ) pressed
  WHERE place = 1 OR total <= :max_bytes
)

-- name: remove_batch
DELETE FROM batches WHERE id = :batch

-- name: sum_claim
UPDATE batches SET (count, bytes) = (
  SELECT count(*), coalesce(sum(bytes), 0) FROM calls WHERE batch = :batch AND batch IS NOT NULL
)
WHERE id = :batch

-- name: batch
SELECT id, pool, nonce, state, owner, count, bytes, intended_at, sent_at, resolved_at, provider_id, expires_at,
  ended_at, clock_offset, abandoned, note, unsent
FROM batches WHERE id = ?

-- name: batches
SELECT id, pool, nonce, state, owner, count, bytes, intended_at, sent_at, resolved_at, provider_id, expires_at,
  ended_at, clock_offset, abandoned, note, unsent
FROM batches WHERE owner = ? AND state NOT IN ({finished})
ORDER BY id

-- name: unfinished_named
SELECT b.id FROM pools p JOIN batches b ON b.credential = p.credential AND b.pool = p.id
WHERE p.provider = :provider AND b.provider_id = :provider_id AND b.state NOT IN ({finished})
ORDER BY b.id

-- name: still_mine
SELECT 1 FROM batches b JOIN engines e ON e.name = b.owner
WHERE b.id = :batch AND b.state = 'submitting' AND b.owner = :owner AND e.lease_until >= :until + e.skew

-- name: depart
UPDATE batches SET unsent = false, sent_at = :now
WHERE id = :batch AND state = 'submitting' AND owner = :owner
  AND EXISTS (SELECT 1 FROM engines e WHERE e.name = :owner AND e.lease_until >= :until + e.skew)

-- name: set_batch
UPDATE batches SET {changes} WHERE id = ?

-- name: move_batch
UPDATE batches SET {changes} WHERE id = ? AND state = ANY (ARRAY[{sources}]::text[])

-- name: line_sizes
SELECT id, bytes FROM calls WHERE batch = ? AND batch IS NOT NULL AND id > ? ORDER BY id LIMIT ?

-- name: line_bodies
SELECT c.id, b.body FROM calls c JOIN bodies b ON b.ticket = c.id
WHERE c.batch = ? AND c.batch IS NOT NULL AND c.id > ? AND c.id <= ? ORDER BY c.id

-- name: release_boarded
UPDATE calls SET state = 'queued', batch = NULL, lane = :lane,
  reason = CASE :lane WHEN 'batch' THEN reason ELSE :reason END, requeues = requeues + :bought::boolean::integer,
  rescue_at = CASE :lane WHEN 'batch' THEN rescue_at ELSE least(rescue_at, :now) END
WHERE id IN (
  SELECT id FROM calls WHERE batch = :batch AND batch IS NOT NULL AND state {from release_boarded} ORDER BY id FOR NO KEY UPDATE
)

-- name: release_sending
UPDATE calls SET batch = NULL
WHERE batch = :batch AND batch IS NOT NULL AND state = 'sending'

-- name: open_calls
SELECT count(*), count(*) FILTER (WHERE awaiter IS NULL OR rescue_at = 'Infinity'),
  max(CASE WHEN awaiter IS NOT NULL AND rescue_at < 'Infinity' THEN rescue_at END)
FROM calls WHERE batch = :batch AND batch IS NOT NULL AND state IN ('boarded', 'sending')

-- name: settled_in_batch
SELECT id FROM calls
WHERE batch = :batch AND batch IS NOT NULL AND id > :after AND state = 'settled'
ORDER BY id LIMIT :limit

-- name: unmentioned
SELECT coalesce(json_agg(id ORDER BY id), '[]')::text FROM (
  SELECT id FROM calls
  WHERE batch = :batch AND batch IS NOT NULL AND id > :after
    AND NOT EXISTS (SELECT 1 FROM entries e WHERE e.ticket = calls.id AND e.purchase = :batch)
  ORDER BY id LIMIT :limit
) untold

-- name: known_provider_ids
SELECT provider_id FROM batches WHERE credential = :credential AND provider_id IS NOT NULL

-- name: suspect
INSERT INTO suspects (batch, provider_id, credential, verdict)
SELECT id, :provider_id, credential, :verdict FROM batches WHERE id = :batch
ON CONFLICT (batch, provider_id) DO UPDATE SET verdict = excluded.verdict

-- name: suspects
SELECT provider_id, verdict FROM suspects WHERE batch = ?

-- name: batch_counts
SELECT state, count(*) FROM batches GROUP BY state

-- name: batches_bought
SELECT count(*) FROM batches WHERE provider_id IS NOT NULL
