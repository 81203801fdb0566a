"""The same examples everywhere: what fails in one place fails in every other."""

from hypothesis import HealthCheck, settings

STEADY = settings(derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
