"""The provider for tests and simulations: the app, the bill, and methods to control it."""

from collections.abc import Mapping, Sequence
from typing import Any

from carpool.mock.core.app import App
from carpool.mock.core.batch import FOREVER, Batch
from carpool.mock.core.bill import Bill
from carpool.mock.core.bill_api import summary
from carpool.mock.core.clock import Now, wall
from carpool.mock.core.config import MockConfig
from carpool.mock.core.state import Arrival, Caller, Seen, State
from carpool.mock.openai.hooks import Post, Sent
from carpool.mock.openai.post import post_over_http


class MockAnthropic:
    def __init__(self, config: MockConfig | None = None, now: Now = wall) -> None:
        self.config = config or MockConfig()
        self._state = State(self.config, now)
        self.app = App(self._state)

    # -- inspection

    @property
    def bill(self) -> Bill:
        """Everything charged up to now, except strangers' batches."""
        self._state.advance()
        return self._state.bill

    @property
    def bill_summary(self) -> dict[str, Any]:
        """The bill's sums, as `GET /mock/bill` has them."""
        return summary(self.bill)

    @property
    def strangers_bill(self) -> Bill:
        self._state.advance()
        return self._state.strangers_bill

    @property
    def batches(self) -> Sequence[Batch]:
        """All batches, oldest first within a workspace, strangers' and deleted ones included."""
        self._state.advance()
        return [batch for shelf in self._state.shelves() for batch in shelf.batches]

    @property
    def requests_seen(self) -> Seen:
        return self._state.seen

    @property
    def arrivals(self) -> Sequence[Arrival]:
        """The synchronous calls in the order of arrival, including refused ones; if there are very many, the latest."""
        return list(self._state.arrivals)

    @property
    def faults_struck(self) -> dict[str, int]:
        return {name: times for name, times in self._state.box.struck.items() if times}

    @property
    def canceled(self) -> Sequence[str]:
        """Ids of the batches whose cancellation was requested."""
        return self._state.canceled

    def batch(self, batch_id: str) -> Batch:
        """This batch, advanced to the current time. KeyError if there is none."""
        self._state.advance()
        for shelf in self._state.shelves():
            batch: Batch | None = shelf.find(batch_id)
            if batch is not None:
                return batch
        raise KeyError(batch_id)

    @property
    def files(self) -> Sequence[str]:
        """Ids of the files at OpenAI, uploads and results, except expired ones."""
        self._state.advance()
        now = self._state.now()
        return [file.id for project in self._state.projects.values() for file in project.files.newest_first(now)]

    def workspace_of(self, credential: str) -> str:
        return self._state.workspace(credential).id

    # -- control

    def script(self, fault: str, times: int = 1) -> None:
        """The fault occurs on its next `times` occasions, regardless of its probability."""
        self._state.box.script(fault, times)

    def end_batch(self, batch_id: str) -> None:
        self._state.advance()
        for shelf in self._state.shelves():
            batch = shelf.find(batch_id)
            if batch is not None:
                shelf.hurry(batch, self._state.now())
        self._state.hooks.stir()

    def hold_batch(self, batch_id: str) -> None:
        """The batch gets stuck: nothing more starts. It can be cancelled, released, ended, or it expires."""
        self.batch(batch_id).hold(self._state.now())
        self._state.hooks.stir()

    def release_batch(self, batch_id: str) -> None:
        self.batch(batch_id).release(self._state.now())
        self._state.hooks.stir()

    def forget_batch(self, batch_id: str, seconds: float = FOREVER) -> None:
        """From now on, and for so long, the provider denies the batch. It runs and is billed all the same."""
        batch, now = self.batch(batch_id), self._state.now()
        batch.forgotten_from, batch.forgotten_until = now, now + seconds

    def add_stranger(self, credential: str, size: int) -> Batch:
        """A batch of another client in this credential's workspace."""
        return self._state.add_stranger(self._state.workspace(credential), size)

    def add_openai_stranger(self, credential: str, size: int, metadata: Mapping[str, str] | None = None) -> Batch:
        """The same at OpenAI."""
        caller = Caller(credential, self._state.workspace(credential))
        return self._state.add_openai_stranger(self._state.project(caller), size, metadata)

    # -- webhooks

    def tell(self, url: str | None, secret: str | None = None) -> None:
        """From now on, events about OpenAI's batches are posted to this URL."""
        self._state.hooks.url = url
        self._state.hooks.secret = secret or self._state.hooks.secret
        self._state.hooks.stir()

    @property
    def hooks_sent(self) -> Sequence[Sent]:
        """Every attempt to deliver an event."""
        return self._state.hooks.sent

    async def carry_hooks(self, post: Post = post_over_http) -> None:
        """Delivers events for ever; the server of the app runs it as a task."""
        await self._state.hooks.carry(self._state.next_end, post)
