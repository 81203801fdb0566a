"""What becomes of calls on `now` when a provider is under pressure: planners without I/O and without a clock.

`Throttle` says how fast an account's calls may go, `Line` whose turn it is, `Breaker` whether the provider is to be
left alone, `Retries` how much may be repeated. `engine.gating` drives them.
"""

from carpool.pressure.breaker import Breaker
from carpool.pressure.line import Line, Place, Tags, tag_set
from carpool.pressure.meter import Meter
from carpool.pressure.retries import Retries
from carpool.pressure.throttle import Mark, Throttle

__all__ = ["Breaker", "Line", "Mark", "Meter", "Place", "Retries", "Tags", "Throttle", "tag_set"]
