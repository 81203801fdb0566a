"""Flow control for calls on `now` when a provider is overloaded. Pure: no I/O, no clock.

`Throttle` limits how fast an account's calls are sent, `FairQueue` picks the next call, `Breaker` stops calls to a
provider that keeps failing, and `RetryBudget` limits retries. `engine.now.gate` drives them.
"""

from carpool.planners.pressure.breaker import Breaker, RetryBudget
from carpool.planners.pressure.fair_queue import FairQueue, QueueEntry, Tags, tag_set
from carpool.planners.pressure.throttle import Mark, Meter, Throttle

__all__ = ["Breaker", "FairQueue", "Mark", "Meter", "QueueEntry", "RetryBudget", "Tags", "Throttle", "tag_set"]
