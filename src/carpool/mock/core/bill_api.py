"""GET /mock/bill."""

from collections.abc import Iterable
from typing import Any

from carpool.mock.core.bill import Bill, Charge
from carpool.mock.core.http import Reply, json_reply

PATH = "/mock/bill"


def show(bill: Bill) -> Reply:
    return json_reply(summary(bill))


def summary(bill: Bill) -> dict[str, Any]:
    """The sum of all charges, and by lane, by model and by both, in the order in which they first came."""
    by_lane: dict[str, list[Charge]] = {}
    by_model: dict[str, list[Charge]] = {}
    by_both: dict[tuple[str, str], list[Charge]] = {}
    for charge in bill.charges:
        by_lane.setdefault(charge.lane, []).append(charge)
        by_model.setdefault(charge.model, []).append(charge)
        by_both.setdefault((charge.model, charge.lane), []).append(charge)
    return {
        **_sum(bill.charges),
        "by_lane": {lane: _sum(charges) for lane, charges in by_lane.items()},
        "by_model": {model: _sum(charges) for model, charges in by_model.items()},
        "lines": [{"model": model, "lane": lane, **_sum(charges)} for (model, lane), charges in by_both.items()],
    }


def _sum(charges: Iterable[Charge]) -> dict[str, Any]:
    purchases = list(charges)
    nano = sum(charge.nano_usd for charge in purchases)
    return {
        "purchases": len(purchases),
        "input_tokens": sum(charge.usage.total_input for charge in purchases),
        "output_tokens": sum(charge.usage.output for charge in purchases),
        "nano_usd": nano,
        "usd": nano / 1_000_000_000,
    }
