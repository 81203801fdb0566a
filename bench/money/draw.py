"""A result as tables and as pictures, in docs/savings.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compact import summaries
from drawing import grid, place_image, place_section

from carpool.cli.simulated import Scene, brief, by_scene, picture_of
from carpool.sim.money.picture import deadline_label
from carpool.sim.money.results import BOUND, RunSummary

PAGE = "savings.md"
NAMES = {
    "claude_code_sessions": "Claude Code",
    "coding": "synthetic fleet",
    "tau_airline_turns": "tau-bench",
    "mooncake_conversation": "Mooncake",
    "azure_code": "Azure",
}
SCENES = (
    ("unattended", "economics"),
    ("attended", "economics"),
    ("unattended", "anthropic"),
    ("attended", "anthropic"),
)
HOUR, READS = 3600.0, "0.1"
LATE = 0.001  # share of the calls; less is not told

Found = Mapping[tuple[Scene, float | None], Mapping[str, RunSummary]]
Column = tuple[str, tuple[Scene, float | None]]


def publish(result: dict[str, Any]) -> None:
    found = summaries(result)
    for scene, group in by_scene(found).items():
        if scene in _pictured(found):
            place_image(_image(scene), picture_of(scene, group, NAMES.get(scene.trace, "")))
    place_section(PAGE, "money", section(result))


def section(result: dict[str, Any]) -> str:
    found = summaries(result)
    by_place = _by_place(found)
    subject = NAMES.get(found[0].key.trace, found[0].key.trace)
    parts = [_introduction(result, subject), *_verdicts(by_place, found, subject)]
    parts += [_embedded(scene, subject) for scene in _pictured(found)]
    for scene in _pictured(found):
        deadlines = sorted({key.deadline_s or 0.0 for key in (one.key for one in found)})
        columns = [(deadline_label(deadline), (scene, deadline)) for deadline in deadlines]
        parts.append(f"{subject}, {scene.mode}, world `{scene.regime}`, by the deadline of each call:\n")
        parts.append(_table(by_place, columns))
    return "\n".join(
        [
            *parts,
            *_by_reads(by_place, found, subject),
            *_by_world(by_place, found, subject),
            *_by_trace(by_place, found),
            *_waits(by_place, found, subject),
        ]
    )


def _embedded(scene: Scene, subject: str) -> str:
    return f"![Cost against deadline: {subject}, {scene.mode}, world {scene.regime}](images/{_image(scene)}.svg)\n"


def _introduction(result: dict[str, Any], subject: str) -> str:
    samples = ", ".join(f"{NAMES.get(name, name)} {what}" for name, what in result["samples"].items())
    return (
        f"Simulated on {result['date']} with {len(result['seeds'])} seeds; each samples other sessions ({samples}). "
        "Figures are cost ÷ now+5m, which is what a good client pays today, ± the 95 % confidence interval over the "
        f"seeds; in brackets the share of the calls that missed their deadline. A cache read costs {READS} of the "
        "input's price where nothing else is said.\n"
    )


def _verdicts(by_place: Found, found: Sequence[RunSummary], subject: str) -> list[str]:
    """Where carpool is cheaper than a good client of today, and where it is dearer."""
    said = []
    for mode in ("unattended", "attended"):
        lists: dict[bool, list[str]] = {True: [], False: []}
        for world in dict.fromkeys(one.key.regime for one in found):
            policies = by_place.get((Scene(found[0].key.trace, mode, world, READS), HOUR), {})
            ratio = policies["carpool"].to_baseline if "carpool" in policies else None
            if ratio is not None:
                lists[ratio.ratio > 1].append(f"`{world}` {ratio.ratio:.2f}")
        if any(lists.values()):
            dearer, cheaper = (", ".join(lists[worse]) or "none" for worse in (True, False))
            said.append(
                f"**{subject}, {mode}, an hour for each call: carpool is dearer than now+5m in the worlds {dearer}; "
                f"cheaper in {cheaper}.**\n"
            )
    return said


# ------------------------------------------------------------ tables


def _by_reads(by_place: Found, found: Sequence[RunSummary], subject: str) -> list[str]:
    reads = list(dict.fromkeys(one.key.read_multiplier for one in found))
    trace = found[0].key.trace
    columns = [
        (f"{mode}, r = {share}", (Scene(trace, mode, "economics", share), HOUR))
        for mode in ("unattended", "attended")
        for share in reads
    ]
    return [
        f"By the price of a cache read (r), {subject}, an hour for each call, world `economics`:\n",
        _table(by_place, columns),
    ]


def _by_world(by_place: Found, found: Sequence[RunSummary], subject: str) -> list[str]:
    worlds, trace = dict.fromkeys(one.key.regime for one in found), found[0].key.trace
    columns = [(world, (Scene(trace, "unattended", world, READS), HOUR)) for world in worlds]
    return [f"By world, {subject}, unattended, an hour for each call:\n", _table(by_place, columns)]


def _by_trace(by_place: Found, found: Sequence[RunSummary]) -> list[str]:
    pairs = dict.fromkeys((one.key.trace, one.key.mode) for one in found)
    columns = [
        (f"{NAMES.get(trace, trace)}, {mode}", (Scene(trace, mode, "economics", READS), HOUR)) for trace, mode in pairs
    ]
    return ["By trace, an hour for each call, world `economics`:\n", _table(by_place, columns)]


def _table(by_place: Found, columns: Sequence[Column]) -> str:
    columns = [one for one in columns if one[1] in by_place]
    policies = list(by_place[columns[0][1]])
    rows = [[f"`{policy}`", *(_cell(by_place[place][policy]) for _, place in columns)] for policy in policies]
    bounds = [next(iter(by_place[place].values())).bound_to_baseline for _, place in columns]
    if any(bounds):
        rows.append([BOUND, *("" if one is None else str(one) for one in bounds)])
    return grid(["policy", *(name for name, _ in columns)], rows)


def _cell(summary: RunSummary) -> str:
    late = summary.timing.misses / summary.timing.calls
    ratio = "" if summary.to_baseline is None else str(summary.to_baseline)
    return ratio if late < LATE else f"{ratio} ({100 * late:.{0 if late >= 0.095 else 1}f} %)"


def _waits(by_place: Found, found: Sequence[RunSummary], subject: str) -> list[str]:
    place = Scene(found[0].key.trace, "unattended", "economics", READS), HOUR
    rows = []
    for policy, one in by_place[place].items():
        seen = one.timing
        times = (seen.turn_p50_s, seen.turn_p95_s, seen.task_p50_s, seen.task_p95_s, seen.added_wait_s)
        counts = (f"{1000 * n / seen.calls:,.0f}" for n in (seen.rescues, seen.batches, seen.api_calls))
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in seen.miss_reasons.items())
        rows.append([f"`{policy}`", *map(brief, times), f"{one.cache_share:.0%}", *counts, reasons])
    head = ["policy", "turn p50", "p95", "task p50", "p95", "added wait", "cached", "rescued", "batches", "API calls"]
    about = (
        f"{subject}, unattended, world `economics`, an hour for each call: times, the share of the input that was read "
        "from a cache, what happened for every 1,000 calls, and why calls were late:\n"
    )
    return [about, grid([*head, "late"], rows)]


# ------------------------------------------------------------ what there is


def _by_place(found: Sequence[RunSummary]) -> Found:
    places: dict[tuple[Scene, float | None], dict[str, RunSummary]] = {}
    for one in found:
        places.setdefault((Scene.of(one.key), one.key.deadline_s), {})[one.policy] = one
    return places


def _pictured(found: Sequence[RunSummary]) -> list[Scene]:
    there, trace = by_scene(found), found[0].key.trace
    scenes = [Scene(trace, mode, world, READS) for mode, world in SCENES]
    return [scene for scene in scenes if scene in there]


def _image(scene: Scene) -> str:
    return f"savings-{scene.mode}-{scene.regime}"
