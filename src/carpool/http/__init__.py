"""HTTP clients: carpool's own, and adapters for the client of the user's SDK.

Each implements `ports.HttpClient`; `tests/contract/test_http_client.py` runs one suite over all of them.
"""

from carpool.http.http1.client import Http1Client
from carpool.http.http1.proxy import OutgoingProxy
from carpool.http.httpx.client import HttpxClient
from carpool.http.httpx.threaded import ThreadedHttpxClient

__all__ = ["Http1Client", "HttpxClient", "OutgoingProxy", "ThreadedHttpxClient"]
