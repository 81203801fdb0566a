-- Statements about settling, the ledger and remembered values.

-- Calls, entries and the number of the next outcome in one statement, because each statement may wait for the GIL.
-- name: stored_tickets
SELECT (
  SELECT json_group_array(json_array(c.id, c.state, c.batch, o.purchase, b.state = 'submitting', c.tags))
  FROM json_each(:tickets) j CROSS JOIN calls c ON c.id = j.value
  LEFT JOIN outcomes o ON o.id = c.outcome LEFT JOIN batches b ON b.id = c.batch
), (
  SELECT json_group_array(json_array(e.ticket, e.purchase, e.lane, e.kind, e.paid, e.would_have_paid))
  FROM json_each(:tickets) j CROSS JOIN entries e ON e.ticket = j.value
), (SELECT coalesce(max(id), 0) + 1 FROM outcomes)

-- name: stored_entries
SELECT json_group_array(json_array(e.ticket, e.purchase, e.lane, e.kind, e.paid, e.would_have_paid))
FROM json_each(?) j CROSS JOIN entries e ON e.ticket = j.value

-- name: next_outcome
SELECT coalesce(max(id), 0) + 1 FROM outcomes

-- Their outcomes have consecutive numbers, in the order of the given tickets.
-- name: settle_calls
UPDATE calls SET state = 'settled', settled_at = :now, sender = NULL, outcome = :first + j.key
FROM json_each(:tickets) j
WHERE calls.id = j.value AND calls.state {from settle_calls}

-- name: insert_outcomes
INSERT INTO outcomes (id, ticket, purchase, kind, status, at, lane, reason, headers, batch, body) VALUES {rows}

-- name: requeue_calls
UPDATE calls SET state = 'queued', batch = NULL, lane = r.lane, sender = NULL,
  reason = CASE r.lane WHEN 'batch' THEN calls.reason ELSE r.reason END, requeues = requeues + (state = 'boarded'),
  rescue_at = CASE r.lane WHEN 'batch' THEN rescue_at ELSE min(rescue_at, :now) END
FROM (
  SELECT value ->> 0 AS ticket, value ->> 1 AS lane, value ->> 2 AS reason FROM json_each(:requeues)
) r
WHERE calls.id = r.ticket AND (calls.state = 'queued' OR calls.state {from requeue_calls})

-- name: unboard_calls
UPDATE calls SET batch = NULL WHERE id IN (SELECT value FROM json_each(?)) AND state = 'sending'

-- name: insert_entries
INSERT INTO entries (ticket, purchase, at, lane, kind, provider, credential, model, usage, paid, would_have_paid,
                     reason, tags)
VALUES {rows}

-- name: complete_entries
INSERT INTO entries (ticket, purchase, at, lane, kind, provider, credential, model, usage, paid, would_have_paid,
                     reason, tags)
VALUES {rows}
ON CONFLICT (ticket, purchase) DO UPDATE SET at = excluded.at, lane = excluded.lane, kind = excluded.kind, provider = excluded.provider,
  credential = excluded.credential, model = excluded.model, usage = coalesce(excluded.usage, usage), paid = excluded.paid,
  would_have_paid = excluded.would_have_paid, reason = excluded.reason, tags = coalesce(excluded.tags, tags)
WHERE paid IS NULL

-- name: add_totals
INSERT INTO sums (credential, lane, kind, purchases, unknown, paid, would_have_paid) VALUES {rows}
ON CONFLICT DO UPDATE SET purchases = purchases + excluded.purchases, unknown = unknown + excluded.unknown,
  paid = paid + excluded.paid, would_have_paid = would_have_paid + excluded.would_have_paid

-- name: totals
SELECT lane, kind, sum(purchases), sum(unknown), sum(paid), sum(would_have_paid) FROM sums
WHERE :credentials IS NULL OR credential IN (SELECT value FROM json_each(:credentials))
GROUP BY lane, kind HAVING sum(purchases) > 0 ORDER BY lane, kind

-- name: entries
SELECT e.ticket, e.purchase, e.at, e.lane, e.kind, e.provider, c.name, e.model, e.usage, e.paid, e.would_have_paid,
  e.reason, e.tags
FROM entries e JOIN credentials c ON c.id = e.credential
WHERE e.ticket = :ticket
  AND (:credentials IS NULL OR e.credential IN (SELECT value FROM json_each(:credentials)))
ORDER BY e.at, e.purchase DESC

-- name: attempts
SELECT count(*) FROM entries WHERE ticket = ? AND purchase < 0

-- name: remember
INSERT INTO memos (kind, key, value, at) VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET value = excluded.value, at = excluded.at

-- name: recall
SELECT key, value FROM memos WHERE kind = ? ORDER BY key

-- name: meta
SELECT value FROM meta WHERE name = ?

-- name: make_meta
INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING
