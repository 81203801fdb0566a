"""The typed contents of `carpool.yaml`. `layers` merges the file, environment variables and flags; `parse` and
`network` check every section and build the types of `values`. Unknown keys are errors.
"""

from carpool.config.layers import Flag
from carpool.config.parse import SECTIONS, read_config, secret_in
from carpool.config.values import Config, Provider, Serving, Tls

__all__ = ["SECTIONS", "Config", "Flag", "Provider", "Serving", "Tls", "read_config", "secret_in"]
