-- Statements about tasks.

-- name: make_task
INSERT INTO tasks (credential, name, last, content) VALUES (?, ?, ?, '') ON CONFLICT DO NOTHING

-- name: task
SELECT content FROM tasks WHERE credential = ? AND name = ?

-- name: write_task
UPDATE tasks SET last = ?, content = ? WHERE credential = ? AND name = ?

-- name: latest_tasks
SELECT content FROM tasks WHERE last >= :since
  AND (:credentials IS NULL OR credential IN (SELECT value FROM json_each(:credentials)))
ORDER BY last DESC, credential, name LIMIT :limit

-- name: remove_tasks
DELETE FROM tasks WHERE last < ?
