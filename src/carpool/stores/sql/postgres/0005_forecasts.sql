-- oldest: 1
-- Version 5. What the engines have learned about times and chances: one row, replaced as a whole.

CREATE TABLE forecasts (
  id integer PRIMARY KEY CHECK (id = 1),
  version bigint NOT NULL,
  state bytea NOT NULL
);
