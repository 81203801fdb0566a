-- Statements about the forecast.

-- name: forecast
SELECT version, state FROM forecasts

-- name: save_forecast
INSERT INTO forecasts (id, version, state) VALUES (1, :known + 1, :state)
ON CONFLICT (id) DO UPDATE SET version = excluded.version, state = excluded.state WHERE forecasts.version = :known
