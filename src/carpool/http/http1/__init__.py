"""carpool's own HTTP client, on the event loop.

- Client: sends requests, and has one pool of idle connections per origin.
- Origin: scheme, host and port; requests to one origin share connections.
- Proxy: an outgoing proxy, through which connections to https origins are opened.
- Connection: one socket, which carries one exchange at a time.
- Exchange: a request and its response, which is pushed to a receiver as it arrives.
- Response: receives what an exchange pushes, for a caller that waits for it.
"""
