"""The proxy's HTTP/1.1 server: connections, request heads, and limits on hostile input."""
