"""The only driver: it claims, plans, commits, and then does the I/O.

The way of a call, top to bottom: `Engine.submit` routes it; `now` is bought by `sending`; `batch` is admitted to the
store and waits in its pool until `buying` claims it into a batch, `following` sees that batch end, `collecting`
settles its lines, and the waiter is woken. `flex` is tried by `flexing`, once. What a provider refuses is `refusing`'s:
`queues` knows where there was no room, `learning` what is never allowed; `sweeping` deletes files that were needed at
the provider. `rescuing` sends it on `now` when its batch would be late; `reconciling`
finds out what became of a create that nobody answered.
"""

from carpool.engine.core import Diverted, Engine
from carpool.engine.desk import Probe
from carpool.engine.entering import Seat
from carpool.engine.events import Event, Hook
from carpool.engine.keyring import Keyring
from carpool.engine.passing import Passage
from carpool.engine.relaying import Outlet, Purchase
from carpool.engine.stats import Stats
from carpool.engine.upstream import Upstream
from carpool.engine.waiting import Reply

__all__ = [
    "Diverted",
    "Engine",
    "Event",
    "Hook",
    "Keyring",
    "Outlet",
    "Passage",
    "Probe",
    "Purchase",
    "Reply",
    "Seat",
    "Stats",
    "Upstream",
]
