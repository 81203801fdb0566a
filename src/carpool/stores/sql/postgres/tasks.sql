-- Statements about tasks, for PostgreSQL.

-- name: make_task
INSERT INTO tasks (credential, name, last, content) VALUES (?, ?, ?, '') ON CONFLICT DO NOTHING

-- Locked until the transaction ends: another process may be adding to it.
-- name: task
SELECT content FROM tasks WHERE credential = ? AND name = ? FOR UPDATE

-- name: write_task
UPDATE tasks SET last = ?, content = ? WHERE credential = ? AND name = ?

-- name: latest_tasks
SELECT content FROM tasks WHERE last >= :since
  AND (:credentials::text IS NULL OR credential = {numbers :credentials})
ORDER BY last DESC, credential, name COLLATE "C" LIMIT :limit

-- name: remove_tasks
DELETE FROM tasks WHERE last < ?
