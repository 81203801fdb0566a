"""The whole of `carpool.yaml`, typed. `layering` lays environment variables and flags over the file, `reading` checks
every section and makes the values of `values`. Nothing is guessed: what is not known or not yet there is refused.
"""

from carpool.config.layering import Flag
from carpool.config.reading import SECTIONS, read_config
from carpool.config.values import Config, Provider, Serving, Tls

__all__ = ["SECTIONS", "Config", "Flag", "Provider", "Serving", "Tls", "read_config"]
