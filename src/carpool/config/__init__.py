"""The typed contents of `carpool.yaml`. `sections` is the table of settings and `values` has the readers of its values;
`layers` merges the file, environment variables and flags, and `read` makes a `Config` of them. Unknown keys are errors.
"""

from carpool.config.layers import Flag
from carpool.config.read import read_config
from carpool.config.sections import Config, ConnectionLimits, Provider, ServerSettings, Tls
from carpool.config.values import secret_in

__all__ = ["Config", "ConnectionLimits", "Flag", "Provider", "ServerSettings", "Tls", "read_config", "secret_in"]
