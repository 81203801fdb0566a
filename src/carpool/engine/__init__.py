"""The engine: the only layer that acts. It claims, plans, commits, and then does the I/O.

The path of a call: the library calls `Engine.submit`; the proxy calls `decide`, and then `relay`, `forward` or
`tickets.admit_to_disk`. On `now` it is bought by `now/send.py`, on `flex` by `now/flex.py`, which
tries once. On `batch` it is admitted to the store by `batch/admit.py` and waits in its pool until `batch/buy.py` claims
it into a batch. `batch/follow.py` polls that batch until it ends, `batch/collect.py` settles its result lines, and the
client is woken. `batch/rescue.py` sends calls on `now` whose batch would be late. `batch/follow.py` also resolves
creates with an unknown outcome.

`batch/api.py` is the only way to a batch API. `cluster/` decides which engine does what where several share a store.
`context.py` has what the parts share, the clients that wait, and the one way in which a call is settled. `keyring.py`
has the secrets, `virtual_keys.py` the keys that are handed out instead of them. `tasks.py` starts every background
task, and `events.py` is what an engine reports.
"""

from carpool.core.upstream import Upstream
from carpool.engine.batch.admit import PendingCall
from carpool.engine.context import Probe, Reply
from carpool.engine.engine import Engine
from carpool.engine.events import Event, Hook, Stats
from carpool.engine.keyring import Keyring
from carpool.engine.now.relay import Purchase, StreamedResponse

__all__ = [
    "Engine",
    "Event",
    "Hook",
    "Keyring",
    "PendingCall",
    "Probe",
    "Purchase",
    "Reply",
    "Stats",
    "StreamedResponse",
    "Upstream",
]
