"""What the provider charges, in whole nano-dollars.

A request's price is summed exactly, in pico-dollars: every price on the list, halved for a batch and times 1.1 for
US-only inference, is a whole number of those per token. It is rounded to nano-dollars, half to even, once per charge.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from carpool.mock.anthropic.models import ModelSpec

Kind = Literal["sync", "batch"]
SEARCH_PICO = 10_000_000_000  # $10 per 1,000 searches, at the same price in a batch


class Usage(msgspec.Struct, frozen=True, gc=False):
    input: int
    """Tokens neither read from nor written to a cache."""
    output: int
    write_5m: int = 0
    write_1h: int = 0
    read: int = 0
    thinking: int = 0
    searches: int = 0
    geo_us: bool = False
    fast: bool = False

    @property
    def total_input(self) -> int:
        return self.input + self.write_5m + self.write_1h + self.read


class Charge(msgspec.Struct, frozen=True, gc=False):
    workspace: str
    credential: str
    kind: Kind
    batch_id: str | None
    custom_id: str | None
    request_id: str
    message_id: str
    model: str
    usage: Usage
    nano_usd: int
    at: float
    fingerprint: str
    """Of the request's body, to identify a charge without an id."""
    tier: str = "default"
    """OpenAI's service tier."""

    @property
    def lane(self) -> str:
        """How it was bought: `now`, `flex` or `batch`."""
        return "batch" if self.kind == "batch" else "flex" if self.tier == "flex" else "now"


def price_pico(spec: ModelSpec, usage: Usage, kind: Kind) -> int:
    tokens = (
        usage.input * spec.input
        + usage.output * spec.output
        + usage.write_5m * spec.write_5m
        + usage.write_1h * spec.write_1h
        + usage.read * spec.read
    ) * 1000
    if spec.long_context_from is not None and usage.total_input > spec.long_context_from:
        tokens *= spec.long_context_times
    if kind == "batch":
        tokens //= 2  # exact: 1,000 is even
    if usage.fast:
        tokens *= 2
    if usage.geo_us and spec.geo_priced:
        tokens = tokens * 11 // 10  # exact: 500 is a multiple of 10
    return tokens + usage.searches * SEARCH_PICO


def price_nano(spec: ModelSpec, usage: Usage, kind: Kind) -> int:
    whole, rest = divmod(price_pico(spec, usage, kind), 1000)
    if rest > 500 or (rest == 500 and whole % 2):
        return whole + 1
    return whole


class Bill:
    """All charges so far. Append-only."""

    def __init__(self) -> None:
        self.charges: list[Charge] = []
        self._by_custom_id: dict[str, list[Charge]] = {}
        self._indexed = 0

    def add(self, charge: Charge) -> None:
        self.charges.append(charge)

    def total(self, *, workspace: str | None = None, credential: str | None = None, kind: Kind | None = None) -> int:
        """Nano-dollars over all charges, or over those that match."""
        return sum(
            charge.nano_usd
            for charge in self.charges
            if (workspace is None or charge.workspace == workspace)
            and (credential is None or charge.credential == credential)
            and (kind is None or charge.kind == kind)
        )

    @property
    def by_custom_id(self) -> Mapping[str, list[Charge]]:
        """Batch charges by custom_id; a custom_id used in two batches has two."""
        for charge in self.charges[self._indexed :]:
            if charge.custom_id is not None:
                self._by_custom_id.setdefault(charge.custom_id, []).append(charge)
        self._indexed = len(self.charges)
        return self._by_custom_id

    def of_batches(self, batch_ids: Iterable[str]) -> list[Charge]:
        wanted = set(batch_ids)
        return [charge for charge in self.charges if charge.batch_id in wanted]
