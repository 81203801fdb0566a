-- Version 7. What the engines have learned about times and chances: one row, replaced as a whole.

CREATE TABLE forecasts (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  version INTEGER NOT NULL,
  state BLOB NOT NULL
);
