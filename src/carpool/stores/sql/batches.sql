-- Statements about engines and batches.

-- name: join
INSERT INTO engines (name, lease_until, pulse_until) VALUES (:engine, :now + :ttl, :now + :pulse)
ON CONFLICT DO UPDATE SET lease_until = excluded.lease_until, pulse_until = excluded.pulse_until

-- name: alive
SELECT 1 FROM engines WHERE name = :engine AND pulse_until >= :now

-- name: lead
INSERT INTO leaders (account, engine) SELECT value, :engine FROM json_each(:accounts) WHERE true
ON CONFLICT DO UPDATE SET engine = excluded.engine WHERE engine NOT IN {live}

-- name: led
SELECT account FROM leaders WHERE engine = :engine AND account IN (SELECT value FROM json_each(:accounts))

-- name: leaders
SELECT account, engine FROM leaders WHERE engine IN {live}

-- name: leads
SELECT 1 FROM leaders WHERE account = :account AND engine = :engine AND engine IN {live}

-- name: resign
DELETE FROM leaders WHERE engine = ?

-- name: leave
DELETE FROM engines WHERE name = ?

-- Earlier users of the file are dead: their leases end, and their names may be reused by other engines.
-- name: void_engines
DELETE FROM engines

-- name: void_leaders
DELETE FROM leaders

-- name: forget_engines
DELETE FROM engines WHERE lease_until < :before AND pulse_until < :before

-- name: void_owners
UPDATE batches SET owner = '' WHERE state NOT IN ({finished}) AND owner <> ''

-- name: void_awaiters
UPDATE calls SET awaiter = NULL WHERE awaiter IS NOT NULL AND id IN ({undelivered})

-- name: void_senders
UPDATE calls SET sender = NULL WHERE state = 'sending' AND sender IS NOT NULL

-- name: take_batches
UPDATE batches SET owner = :engine,
  resolved_at = CASE WHEN state = 'submitting' AND NOT unsent
    THEN max(:now, coalesce((SELECT lease_until FROM engines WHERE name = batches.owner), :now))
    ELSE resolved_at END,
  state = CASE WHEN state = 'submitting' AND NOT unsent THEN 'unknown' ELSE state END
WHERE state NOT IN ({finished})
  AND owner NOT IN {live}
  AND credential IN (SELECT value FROM json_each(:credentials))

-- A call in `sending` is an orphan if the engine that sends it, or else the one that awaits it, is not alive. On lane
-- `now` it stays in `sending`, but an engine that comes back later is no longer its sender.
-- name: return_orphans
UPDATE calls SET
  state = CASE WHEN {in_unfinished_batch} THEN 'boarded' WHEN lane = 'batch' THEN 'queued' ELSE state END,
  batch = CASE WHEN {in_unfinished_batch} THEN batch END,
  sender = NULL
WHERE state {from return_orphans} AND (lane = 'batch' OR sender IS NOT NULL) AND {orphan}

-- name: engines
SELECT name FROM engines WHERE pulse_until >= ?

-- Its cost grows with the number of undelivered calls, so it runs only after an engine has died.
-- name: forget_awaiters
UPDATE calls SET awaiter = NULL
WHERE awaiter IN (SELECT value FROM json_each(:dead)) AND id IN ({undelivered})

-- name: insert_batch
INSERT INTO batches (pool, credential, nonce, state, owner, count, bytes, intended_at, unsent)
SELECT id, credential, :nonce, 'submitting', :owner, 0, 0, :at, :unsent FROM pools WHERE id = :pool

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
      ORDER BY rescue_at, arrived, id LIMIT :max_count
    )
    WINDOW pressing AS (ORDER BY rescue_at, arrived, id ROWS UNBOUNDED PRECEDING)
  )
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
SELECT b.id FROM pools p CROSS JOIN batches b ON b.credential = p.credential AND b.pool = p.id
WHERE p.provider = :provider AND b.provider_id = :provider_id AND b.state NOT IN ({finished})
ORDER BY b.id

-- name: still_mine
SELECT 1 FROM batches b JOIN engines e ON e.name = b.owner
WHERE b.id = :batch AND b.state = 'submitting' AND b.owner = :owner AND e.lease_until >= :until

-- name: depart
UPDATE batches SET unsent = 0, sent_at = :now
WHERE id = :batch AND state = 'submitting' AND owner = :owner
  AND EXISTS (SELECT 1 FROM engines e WHERE e.name = :owner AND e.lease_until >= :until)

-- name: set_batch
UPDATE batches SET {changes} WHERE id = ?

-- name: move_batch
UPDATE batches SET {changes} WHERE id = ? AND state IN ({sources})

-- name: line_sizes
SELECT id, bytes FROM calls WHERE batch = ? AND batch IS NOT NULL AND id > ? ORDER BY id LIMIT ?

-- name: line_bodies
SELECT c.id, b.body FROM calls c CROSS JOIN bodies b ON b.ticket = c.id
WHERE c.batch = ? AND c.batch IS NOT NULL AND c.id > ? AND c.id <= ? ORDER BY c.id

-- name: release_boarded
UPDATE calls SET state = 'queued', batch = NULL, lane = :lane, requeues = requeues + :bought,
  reason = CASE :lane WHEN 'batch' THEN reason ELSE :reason END,
  rescue_at = CASE :lane WHEN 'batch' THEN rescue_at ELSE min(rescue_at, :now) END
WHERE batch = :batch AND batch IS NOT NULL AND state {from release_boarded}

-- name: release_sending
UPDATE calls SET batch = NULL
WHERE batch = :batch AND batch IS NOT NULL AND state = 'sending'

-- name: open_calls
SELECT count(*), coalesce(sum(awaiter IS NULL OR rescue_at >= 9e999), 0),
  max(CASE WHEN awaiter IS NOT NULL AND rescue_at < 9e999 THEN rescue_at END)
FROM (
  SELECT awaiter, rescue_at FROM calls INDEXED BY calls_boarded WHERE batch = :batch AND state = 'boarded'
  UNION ALL SELECT awaiter, rescue_at FROM calls INDEXED BY calls_sending WHERE batch = :batch AND state = 'sending'
)

-- name: settled_in_batch
SELECT id FROM calls INDEXED BY calls_batch
WHERE batch = :batch AND batch IS NOT NULL AND id > :after AND state = 'settled'
ORDER BY id LIMIT :limit

-- name: unmentioned
SELECT json_group_array(id) FROM (
  SELECT id FROM calls INDEXED BY calls_batch
  WHERE batch = :batch AND batch IS NOT NULL AND id > :after
    AND NOT EXISTS (SELECT 1 FROM entries e WHERE e.ticket = calls.id AND e.purchase = :batch)
  ORDER BY id LIMIT :limit
)

-- name: known_provider_ids
SELECT provider_id FROM batches WHERE credential = :credential AND provider_id IS NOT NULL

-- name: suspect
INSERT INTO suspects (batch, provider_id, credential, verdict)
SELECT id, :provider_id, credential, :verdict FROM batches WHERE id = :batch
ON CONFLICT DO UPDATE SET verdict = excluded.verdict

-- name: suspects
SELECT provider_id, verdict FROM suspects WHERE batch = ?

-- name: batch_counts
SELECT state, count(*) FROM batches GROUP BY state

-- name: batches_bought
SELECT count(*) FROM batches WHERE provider_id IS NOT NULL
