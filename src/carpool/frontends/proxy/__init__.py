"""The proxy frontend: agents change one base URL.

The path of a request: `http` reads it. `parse_head` checks its host, splits the options from its path and chooses its
provider. A request that the provider's dialect understands is a call (`calls`), which is sent at once or waits
(`waiting`). All other requests pass through unchanged. Without a task, a `Relay` carries the response; in a task, the
`RequestContext` (`request`) does. `admin` and `tickets` answer under `/carpool/`. `app` connects these.
"""

from carpool.frontends.proxy.app import Proxy

__all__ = ["Proxy"]
