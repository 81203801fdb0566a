"""Virtual keys: who holds one, which provider key it grants, which endpoints it allows, and what its profile changes.

Several holders may share one provider key. So a holder may use only endpoints that answer and store nothing: listing,
reading or changing the contents of the account would show one holder what belongs to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from carpool.core.errors import BadCall, KeyForbidden, KeyRefused, KeyUnready
from carpool.core.keys import PREFIX, SHAPE, KeyHolder, VirtualKey, looks_virtual
from carpool.core.model import Headers, Lane
from carpool.core.upstream import Upstream
from carpool.dialects import DIALECTS, key_headers
from carpool.planners.access.options import Options, capped
from carpool.planners.access.providers import completed, upgrade_refused
from carpool.planners.policy import span

REQUIRED = (
    "carpool takes virtual keys only. Send one, which begins with cpk-, where you send the provider's key; the "
    "operator of carpool creates one with carpool keys add."
)
_PREFIX_BYTES = PREFIX.encode()


@dataclass(frozen=True, slots=True)
class GrantedKey:
    """The provider key that a holder's request is sent with."""

    holder: KeyHolder
    upstream: Upstream
    secret: Headers = field(repr=False)
    payer: str  # the name of that secret for this holder

    def __repr__(self) -> str:  # never the secret
        return f"<GrantedKey at {self.upstream.provider} for {self.payer}>"


def virtual_key(headers: Headers) -> str | None:
    """The virtual key of a request, from whichever header."""
    names = key_headers()
    keys = {key for name, value in headers if name in names and looks_virtual(key := _bare(value))}
    if len(keys) > 1:
        raise KeyRefused("This request carries several virtual keys. Send one.")
    return keys.pop() if keys else None


def _bare(value: str) -> str:
    """The key without `Bearer`. Recognises every form, because no virtual key may reach the provider."""
    value = value.strip()
    return value[7:].strip() if value[:7].lower() == "bearer " else value


def check_query(query: bytes) -> None:
    if _PREFIX_BYTES in query and SHAPE.search(query.decode("latin-1")):
        raise BadCall(_misplaced("the query"))


def _misplaced(place: str) -> str:
    return f"A virtual key is in {place}, which reaches the provider. Send it where the provider's key belongs."


class HolderLookup(Protocol):
    """Knows the holders of virtual keys. `epoch` increases whenever a key may have become valid or invalid."""

    epoch: int

    def find(self, secret: str) -> KeyHolder: ...


class VirtualKeyAccess:
    """Finds the holder of a virtual key and grants the provider key."""

    def __init__(
        self, holders: HolderLookup | None, upstreams: Mapping[str, Upstream], *, required: bool = False
    ) -> None:
        self._virtual_keys = holders
        self._upstreams = upstreams
        self._required = required

    @property
    def epoch(self) -> int:
        return 0 if self._virtual_keys is None else self._virtual_keys.epoch

    def holder(self, path: str, headers: Headers) -> KeyHolder | None:
        """The holder; None without a virtual key. Raises if one is required or invalid."""
        _check_places(path, headers)
        key = virtual_key(headers)
        if key is None or self._virtual_keys is None:
            if self._required:
                raise KeyRefused(REQUIRED)
            return None
        return self._virtual_keys.find(key)

    def grant(self, holder: KeyHolder, method: str, path: str, headers: Headers) -> GrantedKey:
        """The provider key for a request of the holder. Raises if the virtual key does not allow the request."""
        key = holder.key
        if key.provider not in self._upstreams:
            raise KeyUnready(f"The virtual key {key.name} is for the provider {key.provider}, which is not configured.")
        if not holder.secrets:
            raise KeyUnready(
                f"The virtual key {key.name} buys with the key in {key.env}, which is not set where carpool runs. "
                "Set it there, and start carpool again."
            )
        upstream = self._upstreams[key.provider]
        _check_reach(key, upstream, method, completed(path, upstream), headers)
        return GrantedKey(holder, upstream, *holder.provider_key(upstream.dialect.key_header(headers)))


NOBODY = VirtualKeyAccess(None, {})


def _check_places(path: str, headers: Headers) -> None:
    """Refuses a virtual key in any other place, from where it would reach the provider."""
    for name, value in headers:
        if PREFIX in value and name not in key_headers() and SHAPE.search(value):
            raise BadCall(_misplaced(f"the header {name[:60]}"))
    if PREFIX in path and SHAPE.search(path):
        raise BadCall(_misplaced("the path"))


def _check_reach(key: VirtualKey, upstream: Upstream, method: str, path: str, headers: Headers) -> None:
    reads = method in ("GET", "HEAD")
    for name, _ in headers:
        if any(name in dialect.payer_headers for dialect in DIALECTS.values()):
            raise KeyForbidden(f"The virtual key {key.name} decides who pays. Send no {name}.")
    if upgrade_refused(upstream.dialect, path, headers) is not None:
        return  # WebSocket requests are refused later anyway, with a better message
    if (
        not reads
        and path not in upstream.dialect.free_paths
        and not key.profile.allows(Lane.NOW)
        and not upstream.dialect.handles(method, path)
    ):
        raise KeyForbidden(f"The virtual key {key.name} may only use batches, and {path[:100]} can't be batched.")
    open_to_all = (method == "POST" and path in upstream.dialect.open_paths) or (
        reads and _readable(path, upstream.dialect.models_path)
    )
    if not open_to_all and not key.profile.whole_account:
        elsewhere = any(path in dialect.open_paths for dialect in DIALECTS.values())
        if elsewhere and path not in upstream.dialect.open_paths:
            raise KeyForbidden(f"The virtual key {key.name} buys from {key.provider} only, which has no {path[:100]}.")
        raise KeyForbidden(
            f"The virtual key {key.name} may not {method[:20]} {path[:100]}, which may show what belongs to others. "
            "Keys made with --whole-account may."
        )


def _readable(path: str, models_path: str) -> bool:
    model = path.removeprefix(f"{models_path}/")
    return path in ("/", models_path) or (
        model != path and model.replace("-", "").replace(".", "").replace(":", "").isalnum()
    )


# ---------------------------------------------------------------- profiles
# The defaults of a profile are stronger than the rules and weaker than the client's options; its limits are stronger
# than both.


def within_profile(key: VirtualKey, options: Options) -> Options:
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


def apply_profile(key: VirtualKey, client: Options, ruled: Options, now: float) -> Options:
    """Apply the profile after the rules. `client` are the client's options, `ruled` the options after the rules."""
    profile = key.profile
    caching = client.caching or profile.caching or ruled.caching
    options = replace(ruled, tags={**ruled.tags, **profile.tags}, caching=caching)
    if profile.task_budget is not None and not client.tasked and client.lane is not Lane.NOW:
        note = options.note or f"The key {key.name} gives its task a budget."
        options = replace(options, task_budget=profile.task_budget, task_deadline=None, note=note)
    asked = client.timed or client.tasked
    if not asked and client.lane is None and (profile.budget is not None or profile.lane is not None):
        note = f"The key {key.name} gives a {'budget' if profile.lane is None else 'lane'}."
        options = replace(
            options,
            budget=profile.budget,
            deadline=None,
            lane=profile.lane,
            insists=profile.lane is None,
            note=note,
        )
    elif not asked and client.lane not in (None, Lane.NOW) and profile.budget is not None:
        options = replace(options, budget=profile.budget, deadline=None)
    return capped(_on_allowed_lanes(key, options), profile.max_budget, f"The key {key.name}", now)


def _on_allowed_lanes(key: VirtualKey, options: Options) -> Options:
    profile = key.profile
    if not profile.allows(Lane.NOW) and options.lane is not Lane.BATCH:
        return replace(options, lane=Lane.BATCH, insists=True, note=f"The key {key.name} may only use batches.")
    if not profile.allows(Lane.NOW):
        return replace(options, insists=True)
    if not profile.allows(Lane.BATCH) and (options.may_wait or options.lane is Lane.BATCH):
        note = f"The key {key.name} may not take the lane batch."
        return replace(options, lane=Lane.NOW, insists=False, note=note)
    return options
