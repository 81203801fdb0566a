"""`POST /carpool/hooks/NAME`: webhooks about ended batches. Only a hint: carpool then polls the batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from carpool.core.errors import BadCall, NoProvider
from carpool.core.model import Headers
from carpool.core.ports import Clock
from carpool.engine import Engine
from carpool.frontends.proxy.http.asgi import JSON, Receive, Send, read_body, send_whole

PREFIX = "/carpool/hooks/"
MAX_BODY = 100_000
REMEMBERED = 10_000  # webhook ids, to ignore duplicates


class Hooks:
    """`secrets`: by provider. The signature authenticates the sender, so no token is needed."""

    def __init__(self, engine: Engine, clock: Clock, secrets: Mapping[str, str]) -> None:
        self._engine = engine
        self._clock = clock
        self._secrets = secrets
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def answer(self, method: str, path: str, headers: Headers, receive: Receive, send: Send) -> None:
        provider = path.removeprefix(PREFIX)
        if provider not in self._secrets:
            raise NoProvider(
                f"carpool takes no webhooks at {path[:80]}: set providers.NAME.webhook_secret_env for a provider."
            )
        if method != "POST":
            raise BadCall("Webhooks are posted.")
        body = await read_body(receive, MAX_BODY)
        news = self._engine.news(provider, self._secrets[provider], headers, body, self._clock.now())
        if self._is_new(provider, news.id) and news.batch is not None:
            self._engine.look_soon(provider, news.batch)
        await send_whole(send, 200, [JSON], b'{"received":true}')

    def _is_new(self, provider: str, name: str) -> bool:
        if (provider, name) in self._seen:
            return False
        self._seen[provider, name] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return True
