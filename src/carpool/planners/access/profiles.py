"""Apply the profile of a virtual key to a call's options. Pure.

Its defaults are stronger than the rules and weaker than the client's options; its limits are stronger than both.
"""

from __future__ import annotations

from msgspec.structs import replace

from carpool.core.errors import KeyForbidden
from carpool.core.keys import VirtualKey
from carpool.core.model import Lane
from carpool.planners.options import Options
from carpool.planners.rules.decide import capped, span


def asked(key: VirtualKey, options: Options) -> Options:
    """Check the client's options: refuse what the key forbids, and add the tags of its profile."""
    profile = key.profile
    if options.provider is not None and options.provider != key.provider:
        raise KeyForbidden(f"The virtual key {key.name} buys from {key.provider} only. Name no other provider.")
    if options.lane is not None and not profile.allows(options.lane):
        lanes = " or ".join(profile.lanes)
        raise KeyForbidden(f"The virtual key {key.name} may not take the lane {options.lane}: it has {lanes}.")
    most = profile.max_budget
    if profile.refuse_over and most is not None and options.budget is not None and options.budget > most:
        raise KeyForbidden(
            f"The virtual key {key.name} allows a budget of at most {span(most)}, and this call asks for "
            f"{span(options.budget)}. Ask for less."
        )
    return replace(options, tags={**options.tags, **profile.tags})


def completed(key: VirtualKey, client: Options, ruled: Options, now: float) -> Options:
    """Apply the profile after the rules. `client` are the client's options, `ruled` the options after the rules."""
    profile = key.profile
    options = replace(ruled, tags={**ruled.tags, **profile.tags})
    if not client.timed and client.lane is None and (profile.budget is not None or profile.lane is not None):
        note = f"The key {key.name} gives a {'budget' if profile.lane is None else 'lane'}."
        options = replace(
            options,
            budget=profile.budget,
            deadline=None,
            lane=profile.lane,
            insists=profile.lane is None,
            note=note,
        )
    elif not client.timed and client.lane not in (None, Lane.NOW) and profile.budget is not None:
        options = replace(options, budget=profile.budget, deadline=None)
    return capped(_on_allowed_lanes(key, options), profile.max_budget, f"The key {key.name}", now)


def _on_allowed_lanes(key: VirtualKey, options: Options) -> Options:
    profile = key.profile
    if not profile.allows(Lane.NOW) and options.lane is not Lane.BATCH:
        return replace(options, lane=Lane.BATCH, insists=True, note=f"The key {key.name} travels by batch only.")
    if not profile.allows(Lane.NOW):
        return replace(options, insists=True)
    if not profile.allows(Lane.BATCH) and (options.timed or options.lane is Lane.BATCH):
        note = f"The key {key.name} may not take the lane batch."
        return replace(options, lane=Lane.NOW, insists=False, note=note)
    return options
