"""The SQL statements of the PostgreSQL store by name, with the same names as SQLite's."""

from __future__ import annotations

import re
from functools import cache

from carpool.stores.operations.statements import load, sets_of_states, steps

FILES = ("calls.sql", "batches.sql", "ledger.sql", "listing.sql", "keys.sql")
SHARDS = 64  # rows that each count is spread over, so that processes don't wait for each other's locks

_DATABASE_CLOCK = "extract(epoch FROM clock_timestamp())::float8"
_CALLERS_CLOCK = ":now"
# Whether the backend process of an engine's connection is gone. Of other users' backends only the pid is visible.
_MISSING = """backend IS NOT NULL AND pulse_until > 0 AND NOT EXISTS (
  SELECT 1 FROM pg_stat_get_activity(backend) one WHERE coalesce(one.backend_start = backend_since, true)
)"""
# While the same server runs, a live process reconnects within moments. After a restart or a fail-over it may first have
# to notice that the old server is gone, which can take longer: then the pulse decides.
_DEAD = f"""CASE WHEN server_since = pg_postmaster_start_time()
  THEN coalesce(missed_at <= clock_timestamp() - interval '5 seconds', false)
  ELSE missed_at IS NOT NULL AND pulse_until < {_DATABASE_CLOCK} END"""
_LISTS = {"numbers": "ANY (ARRAY(SELECT json_array_elements_text({}::json)::bigint))"}
_LISTS |= {"names": "ANY (ARRAY(SELECT json_array_elements_text({}::json)))"}


@cache
def statements(own_clock: bool) -> dict[str, str]:
    """Loads the statements. `own_clock`: leases use the database's clock; otherwise the caller's, for a simulation."""
    clock = _DATABASE_CLOCK if own_clock else _CALLERS_CLOCK
    live = f"(SELECT name FROM engines WHERE pulse_until >= {clock})"  # noqa: S608
    words = {"missing": _MISSING, "dead": _DEAD, "database_clock": _DATABASE_CLOCK}
    words |= sets_of_states(live) | {"clock": clock, "shard": f"pg_backend_pid() % {SHARDS}"}
    return {name: _lists(text) for file in FILES for name, text in load(f"postgres/{file}", words).items()}


def _lists(text: str) -> str:
    """Expands `{numbers :tickets}`: matches any element of a list that is passed as JSON."""
    return re.sub(r"\{(numbers|names) ([:?\w]+)\}", lambda match: _LISTS[match[1]].format(match[2]), text)


@cache
def migrations() -> dict[int, str]:
    return steps("postgres")


@cache
def for_driver(text: str) -> str:
    """Converts the placeholders `?` and `:name` to psycopg's."""
    text = re.sub(r"(?<!:):(?!:)([a-z_]+)", r"%(\1)s", text.replace("%", "%%"))
    return text.replace("?", "%s")
