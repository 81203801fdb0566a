"""The provider's mock, in a process of its own: no delay beyond its own work, no limits, no faults."""

from __future__ import annotations

import sys

from carpool.mock import Constant, MockConfig, MockServer, run

CONFIG = MockConfig(batch_latency=Constant(0.0), batch_rpm=None, queue_limit=None, mean_output_tokens=40)


def ready(server: MockServer) -> None:
    sys.stdout.write(server.url + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run(CONFIG, port=0, ready=ready)
