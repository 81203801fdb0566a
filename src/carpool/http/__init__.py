"""HTTP clients: carpool's own, and adapters for the client of the user's SDK.

Each implements `ports.HttpClient`; `tests/contract/test_http_client.py` runs one suite over all of them.
"""

from carpool.http.http1_client import Http1Client, OutgoingProxy
from carpool.http.httpx_clients import HttpxClient, ThreadedHttpxClient

__all__ = ["Http1Client", "HttpxClient", "OutgoingProxy", "ThreadedHttpxClient"]
