"""However many calls are kept, the engine's own questions go by an index."""

from __future__ import annotations

from typing import Any

from carpool.core.model import Settlement
from carpool.stores.postgres import PostgresStore
from carpool.stores.postgres.session import for_driver
from tests.support.postgres import swept_url
from tests.support.stores import CRED, LEASE, ME, T0, admission, outcome

KEPT = 6000
SOME = "[1, 2, 3]"
HOT: dict[str, Any] = {
    "hold": (SOME,),
    "known_fingerprints": (SOME,),
    "doubtful": {"fingerprints": SOME, "doubted": '["gone"]'},
    "in_doubt": {"fingerprint": 7919, "credential": 1, "doubted": '["gone"]'},
    "call_by_key": (1, "key"),
    "adoptable": (7919, 1),
    "lately_delivered": (7919, T0, 1),
    "hand_over": {"ticket": 1, "awaiter": ME, "reason": 1, "deadline": None, "rescue_at": T0},
    "delivered": {"tickets": SOME, "now": T0},
    "outcomes": (SOME,),
    "views": (SOME,),
    "pools": ("[1]",),
    "due": {"credentials": "[1]", "until": T0 + 700, "limit": 10, "awaiter": None},
    "next_due": {"credential": 1, "awaiter": None},
    "start_sending": {"ticket": 1, "engine": ME, "now": T0, "reason": 1},
    "stop_sending": (1,),
    "call_counts": (),
    "removable_done": {"before": T0 - 1, "limit": 10},
    "removable_unclaimed": {"before": T0 - 1, "limit": 10},
    "return_orphans": {"now": T0},
    "departed": {"now": T0},
    "forget_awaiters": {"dead": '["gone"]'},
    "anything_waiting": {"pool": 1, "at": T0},
    "claim": {"batch": 1, "pool": 1, "at": T0, "max_count": 10, "max_bytes": 1000},
    "line_sizes": (1, 0, 10),
    "open_calls": {"batch": 1},
    "settled_in_batch": {"batch": 1, "after": 0, "limit": 10},
    "unmentioned": {"batch": 1, "after": 0, "limit": 10},
    "release_boarded": {"batch": 1, "lane": "batch", "reason": 1, "bought": True, "now": T0},
    "stored_tickets": {"tickets": SOME},
    "stored_entries": (SOME,),
    "settle_calls": {"tickets": SOME, "now": T0},
    "requeue_calls": {"requeues": '[[1, "batch", 1]]', "now": T0},
    "newest_settled": {"before": 10**9, "limit": 10},
}


async def test_no_question_of_the_engine_reads_all_that_is_kept() -> None:
    store = await PostgresStore.open(swept_url(), threaded=False, own_clock=False, secret=b"a secret of the test")
    await store.join(ME, T0, LEASE)
    await store.admit_all([admission(ticket, key=f"key {ticket}") for ticket in range(1, KEPT + 1)])
    settled = [Settlement(ticket, outcome()) for ticket in range(1, KEPT - 20)]
    await store.settle(settled, T0)
    await store.delivered(range(1, KEPT // 2), T0)
    assert await store.pools([CRED])
    connection = store._session.connection
    for table in ("calls", "outcomes", "entries", "bodies"):
        connection.execute(f"ANALYZE {table}")
    scanned = []
    for name, asked in HOT.items():
        query = "EXPLAIN " + for_driver(store._session.sql[name])
        plan = "\n".join(row[0] for row in connection.execute(query, asked).fetchall())
        if "Seq Scan on calls" in plan or "Seq Scan on outcomes" in plan:
            scanned.append(f"{name}\n{plan}")
    await store.aclose()
    assert not scanned, "\n\n".join(scanned)
