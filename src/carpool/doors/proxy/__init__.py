"""The proxy door: agents change one base URL.

The way of a request, top to bottom: `app` checks its host, splits the options from its path and chooses its provider
(`choosing`). What the provider's dialect understands is a call (`calling`), which passes at once or waits (`waiting`);
everything else passes through untouched (`passing`). `leaving` sees clients hang up. `admin` answers under `/carpool/`.
"""

from carpool.doors.proxy.app import Proxy

__all__ = ["Proxy"]
