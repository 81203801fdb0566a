"""From rounds to figures: what is compared is compared within its round, and the median of the rounds counts."""

from __future__ import annotations

import statistics
from typing import Any

from measuring import CONNECTIONS, DIRECT

Round = dict[str, Any]
RATIO_AT = "32"  # connections at which contestants are set against each other
WAITING = 10_000  # clients for which the target of memory is set
STRANGERS = 0.2  # more cores than that taken by other work: figures and ratios are not to be trusted


def summary(rounds: list[Round]) -> dict[str, Any]:
    return {name: of_contestant(name, rounds) for name in rounds[0]}


def of_contestant(name: str, rounds: list[Round]) -> dict[str, Any]:
    own = [one[name] for one in rounds]
    direct = [one[DIRECT] for one in rounds]
    firsts = [one["stream"]["first_ms"] for one in own]
    return {
        "levels": {count: of_level(count, own, direct) for count in map(str, CONNECTIONS)},
        "first_ms": middle(firsts),
        "added_first_ms": middle(
            [first - one["stream"]["first_ms"] for first, one in zip(firsts, direct, strict=True)]
        ),
        "rss": None if name == DIRECT else middle([one["rss"] for one in own]),
    }


def of_level(count: str, own: list[Round], direct: list[Round]) -> dict[str, Any]:
    levels, bare = [one["levels"][count] for one in own], [one["levels"][count] for one in direct]
    known = [key for key in ("per_s", "p50_ms", "p99_ms", "cpu_us", "busy") if key in levels[0]]
    found = {key: middle([level[key] for level in levels]) for key in known}
    for key in ("p50_ms", "p99_ms"):
        found[f"added_{key}"] = middle([level[key] - less[key] for level, less in zip(levels, bare, strict=True)])
    found["strangers"] = max(level["strangers"] for level in levels)
    found["failed"] = sum(level["bad_status"] + level["broken"] + level["timeouts"] for level in levels)
    return found


def middle(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets that can be judged by what was measured."""
    found = []
    played, summed = result["rounds"], result["summary"]
    if "carpool" not in summed:
        return []
    sure = disturbed(summed) <= STRANGERS
    if "nginx" in summed:
        told = f"carpool : nginx, one core, {RATIO_AT} connections"
        found.append(judged(told, ratio(played, "nginx"), 0.12, "≥", " (aim 0.25)", sure=sure))
    if "litellm" in summed:
        told = f"carpool : LiteLLM, one core, {RATIO_AT} connections"
        found.append(judged(told, ratio(played, "litellm"), 50, "≥", sure=sure))
    added = summed["carpool"]["levels"]["1"]["added_p50_ms"]
    found.append(judged("added p50 at one connection, ms", added, 1, "≤", sure=sure))
    if result["waiting"]:
        kept, clients = result["waiting"]["bytes_per_client"] / 1000, result["waiting"]["clients"]
        enough = clients >= WAITING
        found.append(judged(f"KB per waiting client at {clients:,}", kept, 40, "≤", sure=enough))
    return found


def ratio(rounds: list[Round], other: str) -> float:
    def rate(one: Round, name: str) -> float:
        return float(one[name]["levels"][RATIO_AT]["per_s"])

    return statistics.median(rate(one, "carpool") / rate(one, other) for one in rounds)


def disturbed(summed: dict[str, Any]) -> float:
    """The most that other work took of the two cores during any load, in cores."""
    return float(max(level["strangers"] for own in summed.values() for level in own["levels"].values()))


def judged(what: str, value: float, target: float, sense: str, more: str = "", *, sure: bool = True) -> dict[str, Any]:
    """On a busy machine a quick contestant loses most, and a ratio to it says nothing: then there is no verdict."""
    reached = value >= target if sense == "≥" else value <= target
    word = ("reached" if reached else "missed") if sure else "unsure"
    wanted = f"{sense} {target:g}{more}"
    text = f"{word:8} {what}: {value:.3g}, wanted {wanted}"
    return {"what": what, "value": round(value, 4), "wanted": wanted, "verdict": word, "text": text}
