"""How long calls and batches take, learned from those that were observed. Pure: the caller passes the time.

What is learned is kept as counts that lose weight with time (`decay`). Everything else is derived from them:

- Batches: `curve`. The hazard of a batch is estimated on logarithmic bins of its age: ends in a bin, divided by the
  batches that passed it. A batch in flight counts in every bin that it has survived, and so does one that was
  cancelled, up to that time. An estimate from completed batches alone would be biased: the slow ones are missing.
- Few observations: the estimate of a class (provider, model, size) starts from that of its model, which starts from
  that of its provider, which starts from the built-in `prior`, with the weight of `WEIGHT` batches each.
- Synchronous calls, cancels: `histogram`, quantiles of observed times relative to the prior.
- Chances (a cancelled line is billed, flex is refused): decayed counts of both outcomes.
- Exploration: `Forecast.probes`. Without it, a forecast that advises against batches would never learn that they have
  become faster.
"""

from __future__ import annotations

from carpool.planners.forecast.forecast import BatchClass, ClassSeen, Forecast
from carpool.planners.forecast.prior import Part, Prior

__all__ = ["BatchClass", "ClassSeen", "Forecast", "Part", "Prior"]
