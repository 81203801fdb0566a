-- oldest: 1
-- Version 6. The tasks of every credential, by name; `content` is a TaskRecord in JSON, `last` when it was active last.

CREATE TABLE tasks (
  credential bigint NOT NULL REFERENCES credentials (id),
  name text NOT NULL,
  last double precision NOT NULL,
  content text NOT NULL,
  PRIMARY KEY (credential, name)
);

CREATE INDEX tasks_by_activity ON tasks (last);
