-- Statements about calls, for PostgreSQL: the same names and results as for SQLite, plus locks against other processes.
-- Names in braces are substituted when the file is loaded. Rows are locked in the order of their tickets.

-- name: insert_credential
INSERT INTO credentials (name) VALUES (?) ON CONFLICT DO NOTHING RETURNING id

-- name: insert_credential_known
SELECT id FROM credentials WHERE name = ?

-- name: known_credentials
SELECT name, id FROM credentials WHERE name = {names ?}

-- name: insert_word
INSERT INTO words (text) VALUES (?) ON CONFLICT DO NOTHING RETURNING id

-- name: insert_word_known
SELECT id FROM words WHERE md5(text) = md5(?)

-- name: insert_pool
INSERT INTO pools (credential, provider, dialect, endpoint, headers, model, size_class, deadline_class)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id

-- name: insert_pool_known
SELECT id FROM pools WHERE credential = ? AND provider = ? AND dialect = ? AND md5(endpoint) = md5(?)
  AND md5(headers) = md5(?) AND md5(model) = md5(?) AND size_class = ? AND deadline_class = ?

-- name: one_pool
SELECT p.id, p.provider, p.dialect, c.name, p.endpoint, p.headers, p.model, p.size_class, p.deadline_class
FROM pools p JOIN credentials c ON c.id = p.credential WHERE p.id = ?

-- name: pools_of
SELECT p.id FROM pools p JOIN credentials c ON c.id = p.credential
WHERE c.name = {names ?}

-- name: hold
SELECT count(*) FROM (
  SELECT id FROM calls WHERE id = {numbers ?} ORDER BY id
  FOR NO KEY UPDATE
) held

-- name: insert_calls
INSERT INTO calls (id, pool, credential, state, lane, arrived, deadline, rescue_at, bytes, fingerprint, key, awaiter,
                   stream, max_output_tokens, model, reason, tags)
VALUES {rows}

-- name: insert_bodies
INSERT INTO bodies (ticket, body) VALUES {rows}

-- name: known_fingerprints
SELECT coalesce(json_agg(DISTINCT fingerprint), '[]')::text FROM calls
WHERE fingerprint = {numbers ?}
  AND delivered_at IS NULL AND awaiter IS NULL

-- name: doubtful
SELECT DISTINCT fingerprint FROM calls
WHERE fingerprint = {numbers :fingerprints} AND awaiter = {names :doubted} AND awaiter IS NOT NULL
  AND delivered_at IS NULL

-- name: in_doubt
SELECT 1 FROM calls
WHERE fingerprint = :fingerprint AND awaiter = {names :doubted} AND awaiter IS NOT NULL
  AND delivered_at IS NULL AND credential = :credential
LIMIT 1

-- name: call_by_key
SELECT id, fingerprint FROM calls WHERE credential = ? AND md5(key) = md5(?) AND key IS NOT NULL

-- Considers all candidates, so that one which another process has just taken does not hide the next.
-- name: adoptable
SELECT id FROM calls
WHERE fingerprint = ? AND delivered_at IS NULL AND awaiter IS NULL AND credential = ?
ORDER BY arrived, id FOR NO KEY UPDATE

-- name: lately_delivered
SELECT id FROM calls
WHERE fingerprint = ? AND delivered_at IS NOT NULL AND delivered_at >= ? AND credential = ? AND state = 'settled'
ORDER BY delivered_at DESC, id DESC LIMIT 1

-- name: hand_over
UPDATE calls SET
  awaiter = coalesce(:awaiter, awaiter),
  reason = CASE state WHEN 'settled' THEN reason ELSE :reason END,
  deadline = CASE state WHEN 'settled' THEN deadline ELSE :deadline::float8 END,
  rescue_at = CASE WHEN state = 'settled' THEN rescue_at
                   WHEN lane = 'batch' THEN :rescue_at
                   ELSE least(rescue_at, :rescue_at) END
WHERE id = :ticket
RETURNING state, lane, deadline

-- name: await_ticket
UPDATE calls SET awaiter = ? WHERE id = ?

-- name: stop_awaiting
UPDATE calls SET awaiter = NULL WHERE id = ? AND awaiter = ?

-- name: delivered
UPDATE calls SET delivered_at = :now, awaiter = NULL
WHERE id IN (
  SELECT id FROM calls WHERE id = {numbers :tickets} ORDER BY id
  FOR NO KEY UPDATE
)

-- name: outcome
SELECT o.ticket, o.kind, o.status, o.body, o.at, o.lane, o.reason, o.headers, o.batch, e.ticket, e.purchase, e.at, e.lane, e.kind,
  e.provider, w.name, e.model, e.usage, e.paid, e.would_have_paid, e.reason, e.tags
FROM calls c JOIN outcomes o ON o.ticket = c.id JOIN credentials r ON r.id = c.credential
LEFT JOIN entries e ON e.ticket = o.ticket AND e.purchase = o.purchase LEFT JOIN credentials w ON w.id = e.credential
WHERE c.id = ? AND r.name = ?

-- name: outcomes
SELECT o.ticket, o.kind, o.status, o.body, o.at, o.lane, o.reason, o.headers, o.batch, e.ticket, e.purchase, e.at, e.lane, e.kind,
  e.provider, w.name, e.model, e.usage, e.paid, e.would_have_paid, e.reason, e.tags
FROM json_array_elements_text(?::json) WITH ORDINALITY j JOIN outcomes o ON o.ticket = j.value::bigint
LEFT JOIN entries e ON e.ticket = o.ticket AND e.purchase = o.purchase LEFT JOIN credentials w ON w.id = e.credential
ORDER BY j.ordinality

-- name: sendable_call
SELECT c.id, c.pool, b.body, m.text, c.requeues, r.text
FROM calls c JOIN bodies b ON b.ticket = c.id JOIN words m ON m.id = c.model JOIN words r ON r.id = c.reason
WHERE c.id = ? AND c.state <> 'settled'

-- name: views
SELECT c.id, c.state, c.requeues, c.rescue_at, c.deadline, c.awaiter IS NOT NULL
FROM json_array_elements_text(?::json) WITH ORDINALITY j JOIN calls c ON c.id = j.value::bigint
WHERE c.state <> 'settled' ORDER BY j.ordinality

-- name: cancel
UPDATE calls SET state = 'settled', settled_at = :at, delivered_at = 0 WHERE id = :ticket AND state {from cancel}

-- name: pools
SELECT pool, count(*), sum(bytes)::bigint, min(arrived), max(arrived), min(rescue_at) FROM calls
WHERE state = 'queued' AND lane = 'batch' AND pool = {numbers ?}
GROUP BY pool ORDER BY pool

-- name: due
SELECT id, state, lane, batch, rescue_at, deadline, awaiter FROM calls
WHERE credential = {numbers :credentials} AND rescue_at <= :until
  AND state IN ('queued', 'boarded') AND rescue_at < 'Infinity' AND (awaiter IS NOT NULL OR lane = 'now')
  AND (:awaiter::text IS NULL OR awaiter = :awaiter)
ORDER BY rescue_at, id LIMIT :limit

-- name: next_due
SELECT rescue_at FROM calls
WHERE credential = :credential
  AND state IN ('queued', 'boarded') AND rescue_at < 'Infinity' AND (awaiter IS NOT NULL OR lane = 'now')
  AND (:awaiter::text IS NULL OR awaiter = :awaiter)
ORDER BY rescue_at LIMIT 1

-- name: start_sending
UPDATE calls SET state = 'sending', sender = :engine, reason = :reason
WHERE id = :ticket AND (
  state {from start_sending}
  OR (state = 'sending' AND (sender IS NULL OR sender = :engine OR sender NOT IN {live}))
)
RETURNING tags

-- name: stop_sending
UPDATE calls SET state = 'boarded', rescue_at = coalesce(deadline, 'Infinity'), sender = NULL
WHERE id = ? AND state {from stop_sending} AND {in_unfinished_batch}

-- name: call_counts
SELECT state, count(*) FROM calls WHERE state = 'queued' GROUP BY state
UNION ALL SELECT state, count(*) FROM calls WHERE state = 'sending' GROUP BY state
UNION ALL SELECT state, count(*) FROM calls WHERE state = 'boarded' AND batch IS NOT NULL GROUP BY state

-- name: undelivered_count
SELECT count(*) FROM calls WHERE state = 'settled' AND delivered_at IS NULL

-- name: add_tally
INSERT INTO tallies (shard, name, count) VALUES ({shard}, ?, ?)
ON CONFLICT (shard, name) DO UPDATE SET count = tallies.count + excluded.count

-- name: tally
SELECT coalesce(sum(count), 0)::bigint FROM tallies WHERE name = ?

-- name: removable_done
SELECT id FROM calls
WHERE state = 'settled' AND delivered_at IS NOT NULL AND delivered_at < :before AND settled_at < :before
  AND NOT EXISTS (SELECT 1 FROM batches b WHERE b.id = calls.batch AND b.state IN ({unfinished}))
ORDER BY delivered_at, id LIMIT :limit FOR UPDATE SKIP LOCKED

-- name: removable_unclaimed
SELECT id FROM calls
WHERE state = 'settled' AND delivered_at IS NULL AND settled_at < :before
  AND NOT EXISTS (SELECT 1 FROM batches b WHERE b.id = calls.batch AND b.state IN ({unfinished}))
ORDER BY settled_at, id LIMIT :limit FOR UPDATE SKIP LOCKED

-- name: remove_outcomes
DELETE FROM outcomes WHERE ticket = {numbers ?}

-- name: remove_calls
DELETE FROM calls WHERE id = {numbers ?} AND state = 'settled'

-- name: remove_bodies
DELETE FROM bodies WHERE ticket = {numbers ?}
