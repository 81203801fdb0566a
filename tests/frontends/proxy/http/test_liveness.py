"""Whether a client has its answer: what the connection itself says of it."""

import asyncio
import socket

from carpool.frontends.proxy.http.liveness import DeliveryReceipts


class Unconnected:
    """A transport whose client reset the connection, which the loop has not heard of yet."""

    def __init__(self) -> None:
        self.socket = socket.socket()

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return self.socket

    def get_write_buffer_size(self) -> int:
        return 1


async def test_a_reset_while_we_close_is_an_answer_that_was_not_received() -> None:
    transport = Unconnected()
    with transport.socket:
        receipts = DeliveryReceipts(transport)  # type: ignore[arg-type]
        receipts.closed(None, by_us=True)
        async with asyncio.timeout(5):
            assert not await receipts.received(lambda: None)
