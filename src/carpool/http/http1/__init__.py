"""carpool's own HTTP/1.1 client for asyncio."""
