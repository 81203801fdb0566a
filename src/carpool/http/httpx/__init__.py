"""Adapters for the client that the user's SDK already has, of `httpx` or `httpx2`.

- `HttpxClient` adapts a client for asyncio, `ThreadedHttpxClient` a blocking one: each of its requests has a thread.
- Connection, here: what the event loop and the thread of one request share.
"""
