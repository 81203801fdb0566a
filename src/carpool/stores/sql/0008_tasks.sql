-- Version 8. The tasks of every credential, by name; `content` is a TaskRecord in JSON, `last` when it was active last.

CREATE TABLE tasks (
  credential INTEGER NOT NULL REFERENCES credentials (id),
  name TEXT NOT NULL,
  last REAL NOT NULL,
  content TEXT NOT NULL,
  PRIMARY KEY (credential, name)
) WITHOUT ROWID;

CREATE INDEX tasks_by_activity ON tasks (last);
