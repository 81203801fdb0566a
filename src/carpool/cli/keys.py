"""`carpool keys`: virtual keys for the clients of a house, each with a profile that its client can't change."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from carpool.cli.setting_up import gather
from carpool.clock import SystemClock
from carpool.config import Config, Provider
from carpool.doors.options import parse_lane
from carpool.errors import CarpoolError, ConfigError
from carpool.keys import PREFIX, KeyState, Profile, VirtualKey, check_free, new_key, revoked, rotated
from carpool.model import Lane
from carpool.policy import DAY, MAX_BUDGET, parse_budget
from carpool.rules.deciding import span
from carpool.stores.cabinet import Cabinet, open_keys

keys = typer.Typer(
    help="Give out virtual keys: each buys with your provider's key, within bounds that its client can't change.\n\n"
    "KEY=$(carpool keys add ci --owner platform --tag team=ci --max-budget 1h)",
    no_args_is_help=True,
    rich_markup_mode=None,
)

CONVENTION = {"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY"}
BUILT = (Lane.NOW, Lane.BATCH)  # the lanes that are there
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
_DAYS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*d\s*")
_TAG = re.compile(r"[^\s=,]{1,60}=[^,]{1,200}")

StoreOption = Annotated[str | None, typer.Option("--store", help="The store: a path, sqlite:///path or postgresql://…")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="The config that carpool serve runs with.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Say it in JSON.")]
Name = Annotated[str, typer.Argument(help="The key's name.")]


# ---------------------------------------------------------------- the commands


@keys.command(short_help="Make a key. It is shown once.")
def add(
    name: Name,
    provider: Annotated[str | None, typer.Option(help="The provider it buys from; the first one otherwise.")] = None,
    env: Annotated[
        str | None, typer.Option(help="The variable that holds the provider's key; api_key_env otherwise.")
    ] = None,
    owner: Annotated[str, typer.Option(help="Whom to ask about it.")] = "",
    budget: Annotated[str | None, typer.Option(help="What calls get that ask for nothing, such as 10m.")] = None,
    lane: Annotated[str | None, typer.Option(help="The lane of calls that ask for nothing.")] = None,
    max_budget: Annotated[str | None, typer.Option(help="The largest budget; larger ones are cut to it.")] = None,
    refuse_over: Annotated[bool, typer.Option("--refuse-over", help="Refuse larger budgets, do not cut them.")] = False,
    lanes: Annotated[str | None, typer.Option(help="The lanes it may take, such as now or now,batch.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A tag that all its calls bear: team=ci. Repeat it.")] = None,
    expires: Annotated[str | None, typer.Option(help="How long it is good: 12h, 30d, or a date: 2027-01-31.")] = None,
    whole_account: Annotated[
        bool, typer.Option("--whole-account", help="Let it also reach batches, files and all else of the account.")
    ] = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a virtual key. Clients send it where they would send the provider's key.

    The key is printed once, and kept as a hash only. It works at once, also where carpool serve is running; the
    variable that it names must be set there.
    """
    settled, now = _config(config, store), SystemClock().now()
    chosen = _provider(settled, provider)
    profile = Profile(
        budget=_budget(budget, "--budget"),
        lane=None if lane is None else _lane(lane),
        max_budget=_budget(max_budget, "--max-budget"),
        refuse_over=refuse_over,
        lanes=_lanes(lanes),
        tags=dict(_tag(text) for text in tag or ()),
        whole_account=whole_account,
    )
    _check(profile)
    variable, until = _variable(chosen, env), _expiry(expires, now)
    with open_keys(settled.store, make=True) as cabinet:
        key, secret = new_key(
            cabinet.pepper, name, chosen.name, variable, now, owner=owner[:200], profile=profile, expires_at=until
        )

        def decide(standing: list[VirtualKey]) -> Sequence[VirtualKey]:
            check_free(standing, name, now)
            return [key]

        cabinet.change(decide)
    _hand_over(key, secret, f"The key {name} buys from {chosen.name} with {variable}. It is not shown again.", as_json)


@keys.command("list", short_help="Show the keys, never their secrets.")
def list_keys(
    everything: Annotated[bool, typer.Option("--all", help="Also those that are not good any more.")] = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who has a key, what it may do, and when it was last used (to the minute)."""
    settled, now = _config(config, store), SystemClock().now()
    with open_keys(settled.store) as cabinet:
        found = [key for key in cabinet.standing() if everything or key.live(now)]
    found.sort(key=lambda key: (key.name, key.created_at))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode([_document(key, now) for key in found]), indent=2).decode())
    elif not found:
        typer.echo("No keys yet. Make one: carpool keys add NAME")
    else:
        Console().print(_table(found, now))


@keys.command(short_help="End a key at once.")
def revoke(name: Name, store: StoreOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """End a key: within two seconds nobody gets in with it. What was bought with it is still collected."""
    settled, now = _config(config, store), SystemClock().now()
    with open_keys(settled.store) as cabinet:
        cabinet.change(lambda standing: revoked(standing, name, now))
    said = f"The key {name} is revoked. Calls that wait with it are still bought, and wait for nobody."
    typer.echo(msgspec.json.encode({"name": name, "state": "revoked"}).decode() if as_json else said)


@keys.command(short_help="Give a key a new secret. It is shown once.")
def rotate(
    name: Name,
    grace: Annotated[str, typer.Option(help="How long the earlier secret is good for yet: 1h.")] = "0",
    store: StoreOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a key a new secret. Its profile, its calls and their answers stay its own."""
    settled, now = _config(config, store), SystemClock().now()
    seconds = _grace(grace)
    with open_keys(settled.store) as cabinet:
        key, secret = _rotate(cabinet, name, now, seconds)
    until = f"is good for {span(seconds)} more" if seconds else "is not good any more"
    _hand_over(
        key, secret, f"The key {name} has a new secret, which is not shown again. The earlier one {until}.", as_json
    )


def _rotate(cabinet: Cabinet, name: str, now: float, grace: float) -> tuple[VirtualKey, str]:
    made: list[tuple[VirtualKey, str]] = []

    def decide(standing: list[VirtualKey]) -> Sequence[VirtualKey]:
        changed, secret = rotated(standing, name, now, grace, cabinet.pepper)
        made.append((changed[-1], secret))
        return changed

    cabinet.change(decide)
    return made[0]


# ---------------------------------------------------------------- what is asked for


def _config(file: Path | None, store: str | None) -> Config:
    return gather(file, None, (), store)


def _provider(config: Config, name: str | None) -> Provider:
    found = [one for one in config.providers if name in (None, one.name)]
    if not found:
        known = ", ".join(one.name for one in config.providers)
        raise ConfigError(f"There is no provider {str(name)[:60]!r}. The config has {known}.")
    return found[0]


def _variable(provider: Provider, given: str | None) -> str:
    """Never repeated when wrong: it is most likely a key."""
    variable = given or provider.api_key_env or CONVENTION.get(provider.name)
    if variable is None:
        raise ConfigError(
            f"Nothing says which key of {provider.name} to buy with: name the variable that holds it with --env, or "
            f"set providers.{provider.name}.api_key_env."
        )
    if not _VARIABLE.fullmatch(variable):
        raise ConfigError(
            "--env takes the name of an environment variable, such as ANTHROPIC_API_KEY, not the key itself."
        )
    return variable


def _budget(text: str | None, flag: str) -> float | None:
    try:
        return None if text is None else parse_budget(text)
    except CarpoolError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _grace(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0s") else _budget(text, "--grace") or 0.0


def _lane(text: str) -> Lane:
    try:
        lane = parse_lane(text)
    except CarpoolError as error:
        raise ConfigError(str(error)) from error
    if lane not in BUILT:
        raise ConfigError(f"The lane {lane} is not there yet: name {' or '.join(BUILT)}.")
    return lane


def _lanes(text: str | None) -> tuple[Lane, ...]:
    return tuple(dict.fromkeys(_lane(part) for part in text.split(","))) if text else ()


def _tag(text: str) -> tuple[str, str]:
    if not _TAG.fullmatch(text):
        raise ConfigError(f"{text[:60]!r} is not a tag. Write --tag name=value, as in --tag team=ci.")
    name, _, value = text.partition("=")
    return name, value


def _check(profile: Profile) -> None:
    if profile.lane is not None and not profile.allows(profile.lane):
        raise ConfigError(f"--lane {profile.lane} is not among --lanes {','.join(profile.lanes)}.")
    most = profile.max_budget
    if most is not None and profile.budget is not None and profile.budget > most:
        raise ConfigError(f"--budget is {span(profile.budget)}, which is more than --max-budget, {span(most)}.")
    if profile.refuse_over and most is None:
        raise ConfigError("--refuse-over says what becomes of budgets over --max-budget: give that, too.")


def _expiry(text: str | None, now: float) -> float | None:
    if text is None:
        return None
    if days := _DAYS.fullmatch(text):
        return now + float(days[1]) * DAY
    try:
        until = datetime.fromisoformat(text.strip())
    except ValueError:
        return now + (_budget(text, "--expires") or MAX_BUDGET)
    at = (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp()
    if at <= now:
        raise ConfigError(f"--expires {text} is past. Name a time to come, such as 30d.")
    return at


# ---------------------------------------------------------------- what is said


def _hand_over(key: VirtualKey, secret: str, said: str, as_json: bool) -> None:
    """The key alone on stdout, so that KEY=$(carpool keys add NAME) works."""
    typer.echo(said, err=True)
    if not os.environ.get(key.env):
        typer.echo(f"{key.env} is not set here. It must be where carpool serve runs.", err=True)
    if as_json:
        typer.echo(msgspec.json.encode(_document(key, key.created_at) | {"key": secret}).decode())
    else:
        typer.echo(secret)


def _document(key: VirtualKey, now: float) -> dict[str, Any]:
    return {
        "name": key.name,
        "state": key.state(now),
        "owner": key.owner,
        "provider": key.provider,
        "env": key.env,
        "env_set": bool(os.environ.get(key.env)),
        "hint": PREFIX + key.hint,
        "profile": msgspec.to_builtins(key.profile),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "ends_at": key.ends_at,
        "last_used": key.last_used,
    }


def _table(found: Sequence[VirtualKey], now: float) -> Table:
    """Four columns of a few lines each, so that it fits into a terminal of 80."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in ("name", "buys with", "profile", "state"):
        table.add_column(head, overflow="fold", no_wrap=head != "profile")
    for key in found:
        table.add_row(
            _whose(key), _bought_with(key), Text(described(key.profile)), _standing(key, now), end_section=True
        )
    return table


def _whose(key: VirtualKey) -> Text:
    owner = f"\n{key.owner}" if key.owner else ""
    return Text.assemble((key.name, "bold"), owner, (f"\n{PREFIX}{key.hint}…", "dim"))


def _bought_with(key: VirtualKey) -> Text:
    unset = "" if os.environ.get(key.env) else "\nnot set here"
    return Text.assemble(key.provider, (f"\n{key.env}{unset}", "dim"))


def _standing(key: VirtualKey, now: float) -> Text:
    state = key.state(now)
    ends = [end for end in (key.ends_at, key.expires_at) if end is not None]
    left = f", {_ago(min(ends) - now)} left" if ends and key.live(now) else ""
    used = "never used" if key.last_used is None else f"used {_ago(now - key.last_used)} ago"
    since = datetime.fromtimestamp(key.created_at, UTC).strftime("%Y-%m-%d")
    style = {KeyState.ACTIVE: "green", KeyState.ENDING: "yellow"}.get(state, "dim")
    return Text.assemble((f"{state}{left}", style), (f"\n{used}\nmade {since}", "dim"))


def _ago(seconds: float) -> str:
    for unit, name in ((DAY, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def described(profile: Profile) -> str:
    said = []
    if profile.budget is not None:
        said.append(f"budget {span(profile.budget)}")
    if profile.lane is not None:
        said.append(f"lane {profile.lane}")
    if profile.max_budget is not None:
        said.append(f"{'refused over' if profile.refuse_over else 'at most'} {span(profile.max_budget)}")
    if profile.lanes:
        said.append(f"only {', '.join(profile.lanes)}")
    if profile.tags:
        said.append(" ".join(f"{name}={value}" for name, value in profile.tags.items()))
    if profile.whole_account:
        said.append("whole account")
    return "; ".join(said) or "no bounds"
