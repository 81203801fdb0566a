-- Statements about the record of calls, for PostgreSQL.

-- name: insert_shapes
INSERT INTO shapes (until, calls, content) VALUES {rows}

-- name: next_shapes
SELECT id, content FROM shapes WHERE id > :after AND until >= :since ORDER BY id LIMIT 1

-- name: recorded_entries
SELECT o.at, e.ticket, e.purchase, e.at, e.lane, e.kind, e.provider, c.name, e.model, e.usage, e.paid,
  e.would_have_paid, e.reason, e.tags
FROM entries e JOIN credentials c ON c.id = e.credential
LEFT JOIN outcomes o ON o.ticket = e.ticket AND o.purchase = e.purchase
WHERE e.ticket = {numbers :tickets} AND (:credentials::text IS NULL OR e.credential = {numbers :credentials})
ORDER BY e.ticket, e.at, e.purchase DESC

-- name: remove_old_shapes
DELETE FROM shapes WHERE id <= (
  SELECT max(id) FROM (SELECT id, until FROM shapes ORDER BY id LIMIT :limit) first WHERE until < :before
)

-- name: count_shapes
SELECT coalesce(sum(calls), 0)::bigint FROM shapes

-- The oldest ones, until at most as many calls are left as may be.
-- name: remove_first_shapes
DELETE FROM shapes WHERE id <= (
  SELECT min(id) FROM (
    SELECT id, sum(calls) OVER (ORDER BY id) AS removed FROM (SELECT id, calls FROM shapes ORDER BY id LIMIT :limit) first
  ) running WHERE removed >= :excess
)

-- How long batches took, from their purchase to their end. Only those that were cancelled, or in doubt, have a note.
-- name: timed_batches
SELECT p.provider, r.name, p.model, b.count, b.ended_at - coalesce(b.resolved_at, b.intended_at), b.note <> ''
FROM batches b JOIN pools p ON p.id = b.pool JOIN credentials r ON r.id = b.credential
WHERE b.ended_at IS NOT NULL AND b.intended_at >= :since ORDER BY b.id
