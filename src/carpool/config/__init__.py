"""The typed contents of `carpool.yaml`. `layers` merges the file, environment variables and flags; `sections` and
`providers` check every section and build its types. Unknown keys are errors.
"""

from carpool.config.layers import Flag
from carpool.config.providers import Provider, secret_in
from carpool.config.sections import Config, ConnectionLimits, Serving, Tls, read_config

__all__ = ["Config", "ConnectionLimits", "Flag", "Provider", "Serving", "Tls", "read_config", "secret_in"]
