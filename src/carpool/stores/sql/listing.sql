-- Statements for lists of stored calls and batches, newest first. Never a body.

-- name: listed_calls
SELECT c.id, p.provider, r.name, p.endpoint, m.text, c.state, coalesce(o.lane, c.lane), c.arrived, c.deadline, c.settled_at,
  c.delivered_at, c.awaiter IS NOT NULL, c.bytes, b.provider_id, w.text, c.tags, o.kind, o.status,
  (SELECT sum(e.paid) FROM entries e WHERE e.ticket = c.id),
  (SELECT sum(e.would_have_paid) FROM entries e WHERE e.ticket = c.id),
  (SELECT count(*) FROM entries e WHERE e.ticket = c.id)
FROM calls c JOIN pools p ON p.id = c.pool JOIN credentials r ON r.id = c.credential
JOIN words m ON m.id = c.model JOIN words w ON w.id = c.reason
LEFT JOIN batches b ON b.id = c.batch LEFT JOIN outcomes o ON o.id = c.outcome
WHERE c.id IN ({found}) ORDER BY c.id DESC

-- name: newest_calls
SELECT id FROM calls WHERE id < :before ORDER BY id DESC LIMIT :limit

-- name: newest_settled
SELECT id FROM calls WHERE id < :before AND state = 'settled' ORDER BY id DESC LIMIT :limit

-- Only calls of given credentials. No index has this order, and one would slow down every call: so the search covers a
-- limited number of the newest calls of all credentials.
-- name: newest_own
SELECT id FROM (
  SELECT id, credential, state FROM calls WHERE id < :before ORDER BY id DESC LIMIT :reach
) WHERE credential IN (SELECT value FROM json_each(:credentials)) AND (:state = '' OR state = :state)
ORDER BY id DESC LIMIT :limit

-- Few calls are open, however many are stored: the partial indexes hold no others.
-- name: newest_open
SELECT id FROM (
  SELECT id FROM calls WHERE state = 'queued' AND :state = 'queued'
  UNION ALL SELECT id FROM calls WHERE state = 'boarded' AND :state = 'boarded'
  UNION ALL SELECT id FROM calls WHERE state = 'sending' AND :state = 'sending'
) WHERE id < :before ORDER BY id DESC LIMIT :limit

-- name: one_call
SELECT id FROM calls
WHERE id = :ticket AND (:credentials IS NULL OR credential IN (SELECT value FROM json_each(:credentials)))

-- name: listed_batches
SELECT id, pool, nonce, state, owner, count, bytes, intended_at, sent_at, resolved_at, provider_id, expires_at,
  ended_at, clock_offset, abandoned, note, unsent
FROM batches WHERE id < :before AND (:state = '' OR state = :state)
  AND (:credentials IS NULL OR credential IN (SELECT value FROM json_each(:credentials)))
ORDER BY id DESC LIMIT :limit
