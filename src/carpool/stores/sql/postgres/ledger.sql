-- Statements about settling, the ledger and remembered values, for PostgreSQL.

-- name: stored_tickets
SELECT (
  SELECT coalesce(json_agg(json_build_array(c.id, c.state, c.batch, o.purchase, b.state = 'submitting', c.tags)), '[]')
  FROM calls c LEFT JOIN outcomes o ON o.ticket = c.id LEFT JOIN batches b ON b.id = c.batch
  WHERE c.id = {numbers :tickets}
)::text, (
  SELECT coalesce(json_agg(json_build_array(e.ticket, e.purchase, e.lane, e.kind, e.paid, e.would_have_paid)), '[]')
  FROM entries e WHERE e.ticket = {numbers :tickets}
)::text, 0

-- name: stored_entries
SELECT coalesce(json_agg(json_build_array(e.ticket, e.purchase, e.lane, e.kind, e.paid, e.would_have_paid)), '[]')::text
FROM entries e WHERE e.ticket = {numbers ?}

-- PostgreSQL finds outcomes by ticket and needs no number.
-- name: next_outcome
SELECT 0

-- name: settle_calls
UPDATE calls SET state = 'settled', settled_at = :now, sender = NULL
WHERE id = {numbers :tickets} AND state {from settle_calls}

-- name: insert_outcomes
INSERT INTO outcomes (ticket, purchase, kind, status, at, lane, reason, headers, batch, body) VALUES {rows}

-- name: requeue_calls
UPDATE calls SET state = 'queued', batch = NULL, lane = r.lane, sender = NULL,
  reason = CASE r.lane WHEN 'batch' THEN calls.reason ELSE r.reason END,
  requeues = requeues + (state = 'boarded')::integer,
  rescue_at = CASE r.lane WHEN 'batch' THEN rescue_at ELSE least(rescue_at, :now) END
FROM (
  SELECT (value ->> 0)::bigint AS ticket, value ->> 1 AS lane, (value ->> 2)::bigint AS reason
  FROM json_array_elements(:requeues::json)
) r
WHERE calls.id = r.ticket AND (calls.state = 'queued' OR calls.state {from requeue_calls})

-- name: unboard_calls
UPDATE calls SET batch = NULL
WHERE id = {numbers ?} AND state = 'sending'

-- name: insert_entries
INSERT INTO entries (ticket, purchase, at, lane, kind, provider, credential, model, usage, paid, would_have_paid,
                     reason, tags)
VALUES {rows}

-- name: complete_entries
UPDATE entries SET at = (r ->> 2)::float8, lane = r ->> 3, kind = r ->> 4, provider = r ->> 5,
  credential = (r ->> 6)::bigint, model = r ->> 7, usage = coalesce(r ->> 8, usage), paid = (r ->> 9)::bigint,
  would_have_paid = (r ->> 10)::bigint, reason = r ->> 11, tags = coalesce(r ->> 12, tags)
FROM json_array_elements(:rows::json) r
WHERE ticket = (r ->> 0)::bigint AND purchase = (r ->> 1)::bigint AND paid IS NULL

-- name: add_totals
INSERT INTO sums (shard, credential, lane, kind, purchases, unknown, paid, would_have_paid)
SELECT {shard}, (r ->> 0)::bigint, r ->> 1, r ->> 2, (r ->> 3)::bigint, (r ->> 4)::bigint, (r ->> 5)::bigint,
  (r ->> 6)::bigint
FROM json_array_elements(:rows::json) r ORDER BY 2, 3, 4
ON CONFLICT (shard, credential, lane, kind) DO UPDATE SET purchases = sums.purchases + excluded.purchases,
  unknown = sums.unknown + excluded.unknown, paid = sums.paid + excluded.paid,
  would_have_paid = sums.would_have_paid + excluded.would_have_paid

-- name: totals
SELECT lane, kind, sum(purchases)::bigint, sum(unknown)::bigint, sum(paid)::bigint, sum(would_have_paid)::bigint
FROM sums WHERE :credentials::text IS NULL OR credential = {numbers :credentials}
GROUP BY lane, kind HAVING sum(purchases) > 0 ORDER BY lane, kind

-- name: entries
SELECT e.ticket, e.purchase, e.at, e.lane, e.kind, e.provider, c.name, e.model, e.usage, e.paid, e.would_have_paid,
  e.reason, e.tags
FROM entries e JOIN credentials c ON c.id = e.credential
WHERE e.ticket = :ticket AND (:credentials::text IS NULL OR e.credential = {numbers :credentials})
ORDER BY e.at, e.purchase DESC

-- name: attempts
SELECT count(*) FROM entries WHERE ticket = ? AND purchase < 0

-- name: remember
INSERT INTO memos (kind, key, value, at) VALUES (?, ?, ?, ?)
ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value, at = excluded.at

-- name: recall
SELECT key, value FROM memos WHERE kind = ? ORDER BY key COLLATE "C"

-- name: meta
SELECT value FROM meta WHERE name = ?

-- name: make_meta
INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING
