-- wrk's script: a POST of a fixed body, and the figures as one line of JSON at the end.
-- wrk … -s load.lua URL -- BODY_FILE HEADER_FILE
function init(args)
  local body = assert(io.open(args[1], "rb"))
  wrk.method, wrk.body = "POST", body:read("*a")
  body:close()
  for line in io.lines(args[2]) do
    local name, value = line:match("^(.-): (.*)$")
    wrk.headers[name] = value
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '{"seconds": %.6f, "requests": %d, "bad_status": %d, "broken": %d, "timeouts": %d, "p50_ms": %.4f, "p90_ms": %.4f, "p99_ms": %.4f}\n',
    summary.duration / 1e6, summary.requests, errors.status, errors.connect + errors.read + errors.write, errors.timeout,
    latency:percentile(50) / 1e3, latency:percentile(90) / 1e3, latency:percentile(99) / 1e3))
end
