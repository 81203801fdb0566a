"""The ways to send HTTP: carpool's own client, or the client that the user's SDK brings along.

Each obeys the contract of `ports.Wire`; `tests/contract/test_wire.py` runs one suite over all of them.
"""

from carpool.wires.httpx_async import HttpxWire
from carpool.wires.httpx_threads import ThreadedHttpxWire
from carpool.wires.reqwest import ReqwestWire
from carpool.wires.straight import StraightWire
from carpool.wires.tunnels import OutgoingProxy

__all__ = ["HttpxWire", "OutgoingProxy", "ReqwestWire", "StraightWire", "ThreadedHttpxWire"]
