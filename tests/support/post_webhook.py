"""A webhook of OpenAI's, posted by hand: it reaches the process that is meant to get it."""

import json

import httpx2

from carpool.core.clock import SystemClock
from carpool.mock import MockServer
from carpool.mock.openai.hooks import sign

SECRET = "whsec_Y2FycG9vbC1tb2NrLXdlYmhvb2stc2VjcmV0"
ENVIRONMENT = {"CARPOOL_TEST_HOOK_SECRET": SECRET}
CHAT = {"model": "gpt-6-luna", "messages": [{"role": "user", "content": "hello"}]}
KEY = {"authorization": "Bearer k"}


def config(upstream: MockServer) -> str:
    """So seldom would it look by itself that no test could wait for it."""
    return (
        "batching: {linger_ms: 50, poll_interval_s: 3000, rpm: 100000}\n"
        f"providers: {{openai: {{dialect: openai, base_url: '{upstream.url}/v1', "
        "webhook_secret_env: CARPOOL_TEST_HOOK_SECRET}}\n"
    )


async def add_secret(client: httpx2.AsyncClient, url: str) -> None:
    """The process at the other end knows the key from now on."""
    answer = await client.post(f"{url}/v1/chat/completions", headers=KEY, json=CHAT)
    assert answer.status_code == 200, answer.text


async def tell(client: httpx2.AsyncClient, url: str, batch: str, name: str = "evt_1") -> None:
    body = json.dumps({"type": "batch.completed", "data": {"id": batch}}).encode()
    now = int(SystemClock().now())
    signed = {"webhook-id": name, "webhook-timestamp": str(now), "webhook-signature": sign(SECRET, name, now, body)}
    answer = await client.post(f"{url}/carpool/hooks/openai", content=body, headers=signed)
    assert answer.status_code == 200, answer.text
