-- Statements about calls. Names in braces are substituted: sets of states from the lifecycle tables when the file is
-- loaded, and `rows` by as many tuples of placeholders as there are rows.

-- name: insert_credential
INSERT INTO credentials (name) VALUES (?)

-- name: credentials
SELECT name, id FROM credentials

-- name: insert_word
INSERT INTO words (text) VALUES (?)

-- name: words
SELECT text, id FROM words

-- name: insert_pool
INSERT INTO pools (credential, provider, dialect, endpoint, headers, model, size_class, deadline_class)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)

-- name: all_pools
SELECT p.id, p.provider, p.dialect, c.name, p.endpoint, p.headers, p.model, p.size_class, p.deadline_class
FROM pools p JOIN credentials c ON c.id = p.credential

-- name: insert_calls
INSERT INTO calls (id, pool, credential, state, lane, arrived, deadline, rescue_at, bytes, fingerprint, key, awaiter,
                   stream, max_output_tokens, model, reason, tags)
VALUES {rows}

-- name: insert_bodies
INSERT INTO bodies (ticket, body) VALUES {rows}

-- name: known_fingerprints
SELECT json_group_array(DISTINCT fingerprint) FROM calls INDEXED BY calls_adoptable
WHERE fingerprint IN (SELECT value FROM json_each(?)) AND delivered_at IS NULL AND awaiter IS NULL

-- name: call_by_key
SELECT id, fingerprint FROM calls WHERE credential = ? AND key = ? AND key IS NOT NULL

-- name: adoptable
SELECT id FROM calls
WHERE fingerprint = ? AND delivered_at IS NULL AND awaiter IS NULL AND credential = ?
ORDER BY arrived, id LIMIT 1

-- name: lately_delivered
SELECT id FROM calls
WHERE fingerprint = ? AND delivered_at IS NOT NULL AND delivered_at >= ? AND credential = ? AND state = 'settled'
ORDER BY delivered_at DESC LIMIT 1

-- A call that is due on lane `now` must stay due, whatever the new client's rescue time is.
-- name: hand_over
UPDATE calls SET
  awaiter = coalesce(:awaiter, awaiter),
  reason = CASE state WHEN 'settled' THEN reason ELSE :reason END,
  deadline = CASE state WHEN 'settled' THEN deadline ELSE :deadline END,
  rescue_at = CASE WHEN state = 'settled' THEN rescue_at
                   WHEN lane = 'batch' THEN :rescue_at
                   ELSE min(rescue_at, :rescue_at) END
WHERE id = :ticket
RETURNING state, lane, deadline

-- name: await_ticket
UPDATE calls SET awaiter = ? WHERE id = ?

-- name: stop_awaiting
UPDATE calls SET awaiter = NULL WHERE id = ? AND awaiter = ?

-- name: delivered
UPDATE calls SET delivered_at = :now, awaiter = NULL WHERE id IN (SELECT value FROM json_each(:tickets))

-- Includes the ledger entry of the purchase, because an answer is delivered with its cost.
-- name: outcome
SELECT o.ticket, o.kind, o.status, o.body, o.at, o.lane, o.reason, o.headers, o.batch, e.ticket, e.purchase, e.at, e.lane, e.kind,
  e.provider, w.name, e.model, e.usage, e.paid, e.would_have_paid, e.reason, e.tags
FROM calls c JOIN outcomes o ON o.id = c.outcome JOIN credentials r ON r.id = c.credential
LEFT JOIN entries e ON e.ticket = o.ticket AND e.purchase = o.purchase LEFT JOIN credentials w ON w.id = e.credential
WHERE c.id = ? AND r.name = ?

-- name: outcomes
SELECT o.ticket, o.kind, o.status, o.body, o.at, o.lane, o.reason, o.headers, o.batch, e.ticket, e.purchase, e.at, e.lane, e.kind,
  e.provider, w.name, e.model, e.usage, e.paid, e.would_have_paid, e.reason, e.tags
FROM json_each(?) j CROSS JOIN calls c ON c.id = j.value CROSS JOIN outcomes o ON o.id = c.outcome
LEFT JOIN entries e ON e.ticket = o.ticket AND e.purchase = o.purchase LEFT JOIN credentials w ON w.id = e.credential

-- name: sendable_call
SELECT c.id, c.pool, b.body, m.text, c.requeues, r.text
FROM calls c JOIN bodies b ON b.ticket = c.id JOIN words m ON m.id = c.model JOIN words r ON r.id = c.reason
WHERE c.id = ? AND c.state <> 'settled'

-- name: views
SELECT c.id, c.state, c.requeues, c.rescue_at, c.deadline, c.awaiter IS NOT NULL
FROM json_each(?) j CROSS JOIN calls c ON c.id = j.value WHERE c.state <> 'settled'

-- No client will fetch the outcome, so the call counts as delivered and is not adopted.
-- name: cancel
UPDATE calls SET state = 'settled', settled_at = :at, outcome = :outcome, delivered_at = 0
WHERE id = :ticket AND state {from cancel}

-- name: pools
SELECT pool, count(*), sum(bytes), min(arrived), max(arrived), min(rescue_at) FROM calls
WHERE state = 'queued' AND lane = 'batch' AND pool IN (SELECT value FROM json_each(?))
GROUP BY pool

-- name: due
SELECT id, state, lane, batch, rescue_at, deadline, awaiter FROM calls INDEXED BY calls_due
WHERE credential IN (SELECT value FROM json_each(:credentials)) AND rescue_at <= :until
  AND state IN ('queued', 'boarded') AND rescue_at < 9e999 AND (awaiter IS NOT NULL OR lane = 'now')
  AND (:awaiter IS NULL OR awaiter = :awaiter)
ORDER BY rescue_at, id LIMIT :limit

-- name: next_due
SELECT rescue_at FROM calls INDEXED BY calls_due
WHERE credential = :credential
  AND state IN ('queued', 'boarded') AND rescue_at < 9e999 AND (awaiter IS NOT NULL OR lane = 'now')
  AND (:awaiter IS NULL OR awaiter = :awaiter)
ORDER BY rescue_at LIMIT 1

-- name: start_sending
UPDATE calls SET state = 'sending', sender = :engine, reason = :reason
WHERE id = :ticket AND (
  state {from start_sending}
  OR (state = 'sending' AND (sender IS NULL OR sender = :engine OR sender NOT IN {live}))
)
RETURNING tags

-- name: stop_sending
UPDATE calls SET state = 'boarded', rescue_at = coalesce(deadline, 9e999), sender = NULL
WHERE id = ? AND state {from stop_sending} AND {in_unfinished_batch}

-- name: call_counts
SELECT 'queued', count(*) FROM calls WHERE state = 'queued'
UNION ALL SELECT 'sending', count(*) FROM calls WHERE state = 'sending'
UNION ALL SELECT 'boarded', count(*) FROM calls WHERE state = 'boarded'

-- name: undelivered_count
SELECT count(*) FROM calls WHERE state = 'settled' AND delivered_at IS NULL

-- name: add_tally
INSERT INTO tallies (name, count) VALUES (?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count

-- name: tally
SELECT count FROM tallies WHERE name = ?

-- name: removable_done
SELECT id FROM calls INDEXED BY calls_done
WHERE state = 'settled' AND delivered_at IS NOT NULL AND delivered_at < :before AND settled_at < :before
  AND NOT EXISTS (SELECT 1 FROM batches b WHERE b.id = calls.batch AND b.state IN ({unfinished}))
ORDER BY delivered_at LIMIT :limit

-- name: removable_unclaimed
SELECT id FROM calls INDEXED BY calls_unclaimed
WHERE state = 'settled' AND delivered_at IS NULL AND settled_at < :before
  AND NOT EXISTS (SELECT 1 FROM batches b WHERE b.id = calls.batch AND b.state IN ({unfinished}))
ORDER BY settled_at LIMIT :limit

-- name: remove_outcomes
DELETE FROM outcomes WHERE id IN (SELECT c.outcome FROM json_each(?) j CROSS JOIN calls c ON c.id = j.value)

-- name: remove_calls
DELETE FROM calls WHERE id IN (SELECT value FROM json_each(?)) AND state = 'settled'

-- name: remove_bodies
DELETE FROM bodies WHERE ticket IN (SELECT value FROM json_each(?))
