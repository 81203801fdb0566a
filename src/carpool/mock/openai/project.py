"""A project: the files, batches, caches and limits that its credentials share."""

from __future__ import annotations

from collections.abc import Callable

from carpool.mock.core.bill import Bill, Charge, Usage
from carpool.mock.core.config import MockConfig
from carpool.mock.core.limits import TokenBucket
from carpool.mock.core.shelf import Shelf
from carpool.mock.openai.batch import OpenAIBatch, Problem, problem
from carpool.mock.openai.bill import price_nano
from carpool.mock.openai.cache import OpenAICache
from carpool.mock.openai.digest import Asked
from carpool.mock.openai.files import Files, StoredFile
from carpool.mock.openai.results import error_lines, output_lines
from carpool.mock.openai.sale import name_of, use


class Project(Shelf[OpenAIBatch]):
    def __init__(
        self,
        id: str,  # noqa: A002
        config: MockConfig,
        bill: Bill,
        strangers_bill: Bill,
        now: float,
        announce: Callable[[OpenAIBatch], None],
    ) -> None:
        super().__init__(id, bill, strangers_bill, now)
        hourly = config.openai.creates_per_hour
        self.creates = TokenBucket(None if hourly is None else hourly / 60, now, hourly)
        self.files = Files()
        # Synchronous and batch traffic do not see each other's entries.
        self.sync_cache, self._batch_cache = OpenAICache(), OpenAICache()
        self._config = config
        self._announce = announce

    # -- time

    def advance(self, now: float) -> None:
        """As for every API; but first, what has been read by then is accepted or fails."""
        read = [batch for batch in self._open if not batch.judged and batch.validated_at <= now]
        for batch in sorted(read, key=lambda one: one.validated_at):
            batch.judge(self._full(batch))
        for batch in self._open:
            batch.at = now
        super().advance(now)

    def next_end(self) -> float | None:
        """When the next batch ends, as far as is known."""
        ends = (min(batch.ends_at, batch.ends_at if batch.judged else batch.validated_at) for batch in self._open)
        return min(ends, default=None)

    def _full(self, batch: OpenAIBatch) -> Problem | None:
        """Why there is no room for it at the time when it was read.

        What had ended by an earlier look has been read earlier too, so that the open ones are all that matter.
        """
        model, limit = batch.model or "", self._config.openai.token_limit(batch.model or "")
        taken = sum(one.tokens for one in self._open if one.model == model and one.counts_at(batch.validated_at))
        if not batch.crowded and (limit is None or taken + batch.tokens <= limit):
            return None
        said = f"Enqueued token limit reached for {model} in organization {self._config.organization}."
        told = f"{said} Limit: {limit or taken:,} enqueued tokens."
        return problem(
            "token_limit_exceeded", f"{told} Please try again once some in_progress batches have been completed."
        )

    def _ended(self, batch: OpenAIBatch) -> None:
        batch.at = batch.ends_at
        if batch.failure is None and not self._config.openai.habits.pages_results:
            batch.output_file_id = self._leave(batch, "output")
            batch.error_file_id = self._leave(batch, "error")
        if not batch.stranger:
            self._announce(batch)

    def _leave(self, batch: OpenAIBatch, what: str) -> str | None:
        """A result file, unless it would be empty."""
        lines = output_lines if what == "output" else error_lines
        always = what == "error" and self._config.openai.habits.error_file_always
        if not always and next(lines(batch), None) is None:
            return None
        file = StoredFile(
            id=f"file-{batch.seed:016x}{what}",
            filename=f"{batch.id}_{what}.jsonl",
            purpose="batch_output",
            created=batch.ends_at,
            expires=batch.ends_at + batch.keep_files_s,
            lines=lambda: lines(batch),
            batch_id=batch.id,
        )
        self.files.add(file)
        return file.id

    def forget(self, file: StoredFile) -> None:
        """Deletes a file, and with a batch's last result what only its results needed."""
        self.files.remove(file.id)
        batch = self.find(file.batch_id or "")
        if batch is None:
            return
        left = (batch.output_file_id, batch.error_file_id)
        if not any(name is not None and self.files.find(name, 0.0) for name in left):
            batch.let_go()

    # -- billing

    def _use(self, batch: OpenAIBatch, index: int) -> Usage:
        return use(_asked(batch, index), self._batch_cache, batch.starts[index])

    def _charge(self, batch: OpenAIBatch, index: int, usage: Usage) -> Charge:
        asked, unique = _asked(batch, index), f"{batch.tag}{index:06x}"
        return Charge(
            workspace=self.id,
            credential=batch.credential,
            kind="batch",
            batch_id=batch.id,
            custom_id=batch.custom_ids[index],
            request_id=f"req_{unique}",
            message_id=name_of(asked, unique),
            model=asked.model,
            usage=usage,
            nano_usd=price_nano(asked.spec, usage, "batch"),
            at=batch.ends[index],
            fingerprint=asked.fingerprint,
        )


def _asked(batch: OpenAIBatch, index: int) -> Asked:
    request = batch.requests[index]
    assert isinstance(request, Asked)  # a refused one never executes
    return request
