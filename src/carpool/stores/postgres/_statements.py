"""The SQL of the PostgreSQL store by name: the same names as SQLite's, with the words that this database has."""

from __future__ import annotations

import re
from functools import cache

from carpool.stores._statements import load, sets_of_states, steps

FILES = ("calls.sql", "batches.sql", "ledger.sql", "listing.sql", "keys.sql")
SHARDS = 64  # rows that one count is spread over, so that processes don't wait for each other

_DATABASE_CLOCK = "extract(epoch FROM clock_timestamp())::float8"
_CALLERS_CLOCK = ":now"
# Whether the server's process behind an engine is gone. Of another user's processes nothing but their number is shown.
_MISSING = """backend IS NOT NULL AND pulse_until > 0 AND NOT EXISTS (
  SELECT 1 FROM pg_stat_get_activity(backend) one WHERE coalesce(one.backend_start = backend_since, true)
)"""
# On the server that it was connected to, a process that lives connects again within moments. After a restart or a
# fail-over it may take as long as it takes to notice that the old server is silent: there the pulse decides.
_DEAD = f"""CASE WHEN server_since = pg_postmaster_start_time()
  THEN coalesce(missed_at <= clock_timestamp() - interval '5 seconds', false)
  ELSE missed_at IS NOT NULL AND pulse_until < {_DATABASE_CLOCK} END"""
_LISTS = {"numbers": "ANY (ARRAY(SELECT json_array_elements_text({}::json)::bigint))"}
_LISTS |= {"names": "ANY (ARRAY(SELECT json_array_elements_text({}::json)))"}


@cache
def statements(own_clock: bool) -> dict[str, str]:
    """`own_clock`: leases last on the database's clock; else on that of whoever asks, as a simulation needs it."""
    clock = _DATABASE_CLOCK if own_clock else _CALLERS_CLOCK
    live = f"(SELECT name FROM engines WHERE pulse_until >= {clock})"  # noqa: S608
    words = {"missing": _MISSING, "dead": _DEAD, "database_clock": _DATABASE_CLOCK}
    words |= sets_of_states(live) | {"clock": clock, "shard": f"pg_backend_pid() % {SHARDS}"}
    return {name: _lists(text) for file in FILES for name, text in load(f"postgres/{file}", words).items()}


def _lists(text: str) -> str:
    """`{numbers :tickets}`: any of a list that is given as JSON."""
    return re.sub(r"\{(numbers|names) ([:?\w]+)\}", lambda found: _LISTS[found[1]].format(found[2]), text)


@cache
def migrations() -> dict[int, str]:
    return steps("postgres")


@cache
def for_driver(text: str) -> str:
    """`?` and `:name` as psycopg writes them."""
    text = re.sub(r"(?<!:):(?!:)([a-z_]+)", r"%(\1)s", text.replace("%", "%%"))
    return text.replace("?", "%s")
