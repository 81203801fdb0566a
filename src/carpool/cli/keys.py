"""`carpool keys`: virtual keys for clients, each with a profile that the client can't change."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from carpool.cli import flags
from carpool.cli.console import console, print_json
from carpool.cli.setup import gather
from carpool.config import Config, Provider
from carpool.config.values import variable as read_variable
from carpool.core.clock import SystemClock
from carpool.core.errors import CarpoolError, ConfigError
from carpool.core.keys import PREFIX, KeyState, Profile, VirtualKey, check_free, check_name, new_key, revoked, rotated
from carpool.core.model import CachingMode, Lane
from carpool.core.settings import Choice, check
from carpool.dialects import DEFAULT_DIALECT, DIALECTS
from carpool.planners.access.read_rules import read_budget
from carpool.planners.policy import DAY, parse_budget, span
from carpool.stores import open_keys, shown, store_exists

# ------------------------------------------------------------ key profiles
# Parse and check the options of `carpool keys`. Errors name the option.

LONGEST = 36_500 * DAY
_CACHING = Choice(tuple(CachingMode), "off, observe or plan")
_LANE = Choice((Lane.NOW, Lane.BATCH), "now or batch")
_DAYS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*d\s*", re.ASCII)
_TAG = re.compile(r"[^\s=,]{1,60}=[^,]{1,200}")


def find_provider(config: Config, name: str | None) -> Provider:
    named = [provider for provider in config.providers if name in (None, provider.name)]
    if not named:
        known = ", ".join(provider.name for provider in config.providers)
        raise ConfigError(f"There is no provider {str(name)[:60]!r}. The config has {known}.")
    return named[0]


def key_variable(provider: Provider, given: str | None) -> str:
    """The environment variable with the provider's key."""
    variable = given or provider.api_key_env or (provider.name in DIALECTS and DIALECTS[provider.name].key_variable)
    if not variable:
        raise ConfigError(
            f"It is not known which key of {provider.name} to buy with: name the variable that holds it with --env, "
            f"or set providers.{provider.name}.api_key_env."
        )
    return str(read_variable(DEFAULT_DIALECT.key_variable)(variable, "--env"))


def parse_duration(text: str, flag: str) -> float:
    days = _DAYS.fullmatch(text)
    try:
        seconds = float(days[1]) * DAY if days else parse_budget(text)
    except CarpoolError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST:
        date = ", or a future date such as 2030-01-31" if flag == "--expires" else ""
        raise ConfigError(f"{flag} is {text[:40]!r}; it must be a duration, such as 90m, 12h or 30d{date}.")
    return seconds


def parse_expiry(text: str, now: float) -> float:
    try:
        until = datetime.fromisoformat(text.strip())
    except ValueError:
        return now + parse_duration(text, "--expires")
    at = (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp()
    if at <= now:
        raise ConfigError(f"--expires {text} is in the past. Write a future date, or a duration such as 30d.")
    return at


def _parse_caching(text: str) -> CachingMode:
    check(_CACHING, text, "--caching")
    return CachingMode(text)


def parse_lane(text: str, flag: str) -> Lane:
    name = text.strip().lower()
    check(_LANE, name, flag)
    return Lane(name)


def parse_tags(texts: Iterable[str]) -> dict[str, str]:
    for text in texts:
        if not _TAG.fullmatch(text):
            raise ConfigError(f"{text[:60]!r} is not a tag. Write --tag name=value, as in --tag team=ci.")
    return dict(text.split("=", 1) for text in texts)


def check_profile(name: str, profile: Profile) -> None:
    check_name(name)
    if profile.lane is not None and not profile.allows(profile.lane):
        raise ConfigError(f"--lane {profile.lane} is not among --lanes {','.join(profile.lanes)}.")
    most = profile.max_budget
    if most is not None and profile.budget is not None and profile.budget > most:
        raise ConfigError(f"--budget is {span(profile.budget)}, which is more than --max-budget, {span(most)}.")
    if profile.refuse_over and most is None:
        raise ConfigError("--refuse-over refuses budgets over --max-budget: set that, too.")


keys = typer.Typer(
    help="Virtual keys: each buys with your provider's key, within limits that its client can't change.\n\n"
    "KEY=$(carpool keys add ci --owner platform --tag team=ci --max-budget 1h)",
    no_args_is_help=True,
    rich_markup_mode=None,
)


Name = Annotated[str, typer.Argument(metavar="NAME", help="The key's name.", autocompletion=flags.key_names)]


# ---------------------------------------------------------------- commands


@keys.command(short_help="Create a key. It is printed once.")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The key's name.")],
    provider: flags.Provider = None,
    env: flags.Env = None,
    owner: flags.Owner = "",
    budget: flags.Budget = None,
    task_budget: flags.TaskBudget = None,
    lane: flags.Lane = None,
    max_budget: flags.MaxBudget = None,
    refuse_over: flags.RefuseOver = False,
    lanes: flags.Lanes = None,
    caching: flags.Caching = None,
    tag: flags.Tag = None,
    expires: flags.Expires = None,
    whole_account: flags.WholeAccount = False,
    create: flags.Create = False,
    store: flags.Store = None,
    config: flags.ConfigFile = None,
    as_json: flags.Json = False,
) -> None:
    """Create a virtual key. Clients send it instead of the provider's key.

    The key is printed once, and stored as a hash only. A running carpool serve accepts it at once; the variable with
    the provider's key must be set there.
    """
    profile = Profile(
        budget=None if budget is None else read_budget(budget, "--budget"),
        lane=None if lane is None else parse_lane(lane, "--lane"),
        max_budget=None if max_budget is None else read_budget(max_budget, "--max-budget"),
        refuse_over=refuse_over,
        lanes=() if lanes is None else tuple(dict.fromkeys(parse_lane(part, "--lanes") for part in lanes.split(","))),
        caching=None if caching is None else _parse_caching(caching),
        tags=parse_tags(tag or ()),
        whole_account=whole_account,
        task_budget=None if task_budget is None else read_budget(task_budget, "--task-budget"),
    )
    check_profile(name, profile)
    settings, now = gather(config, None, (), store), SystemClock().now()
    chosen = find_provider(settings, provider)
    variable, until = key_variable(chosen, env), None if expires is None else parse_expiry(expires, now)
    key, secret = _insert(
        settings.store,
        lambda pepper: new_key(
            pepper, name, chosen.name, variable, now, owner=owner[:200], profile=profile, expires_at=until
        ),
        may_create=store is None or create,
    )
    _show_secret(
        key, secret, f"The key {name} buys from {chosen.name} with {variable}. It is not shown again.", as_json
    )


def _insert(store: str, make: Callable[[bytes], tuple[VirtualKey, str]], *, may_create: bool) -> tuple[VirtualKey, str]:
    fresh = not store_exists(store)
    if fresh and not may_create:
        raise ConfigError(
            f"There is no store at {shown(store)}. Name the one that carpool serve uses, or add --create to create it."
        )
    with open_keys(store, make=True) as admin:
        key, secret = make(admin.pepper)

        def decide(existing: list[VirtualKey]) -> Sequence[VirtualKey]:
            check_free(existing, key.name, key.created_at)
            return [key]

        admin.change(decide)
    if fresh:
        typer.echo(f"The store {shown(store)} is new. carpool serve must use the same one.", err=True)
    return key, secret


@keys.command("list", short_help="List the keys, without their secrets.")
def list_keys(
    everything: Annotated[bool, typer.Option("--all", help="Also list keys that are no longer valid.")] = False,
    store: flags.Store = None,
    config: flags.ConfigFile = None,
    as_json: flags.Json = False,
) -> None:
    """List the keys: the owner, the limits, and when it was last used (to the minute)."""
    now = SystemClock().now()
    with open_keys(gather(config, None, (), store).store) as admin:
        existing = admin.stored()
    chosen = [key for key in existing if everything or key.live(now)]
    chosen.sort(key=lambda key: (key.name, key.created_at))
    if as_json:
        print_json([_document(key, now) for key in chosen])
    elif chosen:
        console().print(_table(chosen, now))
    elif existing:
        count = len(existing)
        ended = "the only one has ended" if count == 1 else f"all {count} have ended"
        typer.echo(f"No key is valid: {ended}. carpool keys list --all shows them.")
    else:
        typer.echo("No keys yet: carpool keys add NAME creates one.")


@keys.command(short_help="Revoke a key at once.")
def revoke(name: Name, store: flags.Store = None, config: flags.ConfigFile = None, as_json: flags.Json = False) -> None:
    """Revoke a key: within two seconds it is refused. Batches that were bought with it are still collected."""
    now = SystemClock().now()
    with open_keys(gather(config, None, (), store).store) as admin:
        admin.change(lambda existing: revoked(existing, name, now))
    message = f"The key {name} is revoked. Its waiting calls are still bought, but nobody can fetch their answers."
    typer.echo(msgspec.json.encode({"name": name, "state": "revoked"}).decode() if as_json else message)


@keys.command(short_help="Replace the secret of a key. It is printed once.")
def rotate(
    name: Name,
    grace: Annotated[
        str, typer.Option(metavar="DURATION", help="How long the previous secret stays valid, such as 1h.")
    ] = "0",
    store: flags.Store = None,
    config: flags.ConfigFile = None,
    as_json: flags.Json = False,
) -> None:
    """Replace the secret of a key. Its profile, calls and answers stay."""
    now = SystemClock().now()
    seconds = 0.0 if grace.strip() in ("0", "0s") else parse_duration(grace, "--grace")
    with open_keys(gather(config, None, (), store).store) as admin:
        made: list[tuple[VirtualKey, str]] = []

        def decide(existing: list[VirtualKey]) -> Sequence[VirtualKey]:
            changed, secret = rotated(existing, name, now, seconds, admin.pepper)
            made.append((changed[-1], secret))
            return changed

        admin.change(decide)
    key, secret = made[0]
    until = f"stays valid for {span(seconds)}" if seconds else "is no longer valid"
    _show_secret(
        key, secret, f"The key {name} has a new secret, which is not shown again. The previous one {until}.", as_json
    )


# ---------------------------------------------------------------- output


def _show_secret(key: VirtualKey, secret: str, message: str, as_json: bool) -> None:
    """Print only the key to stdout, so that KEY=$(carpool keys add NAME) works."""
    typer.echo(message, err=True)
    if not os.environ.get(key.env):
        typer.echo(f"{key.env} is not set here. It must be set where carpool serve runs.", err=True)
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


def _table(keys: Sequence[VirtualKey], now: float) -> Table:
    """Four columns of a few lines each, so that the table fits into 80 columns."""
    columns = [
        Column(name, overflow="fold", no_wrap=name != "profile") for name in ("name", "buys with", "profile", "state")
    ]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for key in keys:
        owner = f"\n{key.owner}" if key.owner else ""
        unset = "" if os.environ.get(key.env) else "\nnot set here"
        state, ends = key.state(now), [end for end in (key.ends_at, key.expires_at) if end is not None]
        left = f", {_ago(min(ends) - now)} left" if ends and key.live(now) else ""
        used = "never used" if key.last_used is None else f"used {_ago(now - key.last_used)} ago"
        since = datetime.fromtimestamp(key.created_at, UTC).strftime("%Y-%m-%d")
        style = {KeyState.ACTIVE: "green", KeyState.ENDING: "yellow"}.get(state, "dim")
        table.add_row(
            Text.assemble((key.name, "bold"), owner, (f"\n{PREFIX}{key.hint}…", "dim")),
            Text.assemble(key.provider, (f"\n{key.env}{unset}", "dim")),
            Text(_described(key.profile)),
            Text.assemble((f"{state}{left}", style), (f"\n{used}\ncreated {since}", "dim")),
            end_section=True,
        )
    return table


def _ago(seconds: float) -> str:
    for unit, name in ((DAY, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def _described(profile: Profile) -> str:
    parts = []
    if profile.budget is not None:
        parts.append(f"budget {span(profile.budget)}")
    if profile.task_budget is not None:
        parts.append(f"task budget {span(profile.task_budget)}")
    if profile.lane is not None:
        parts.append(f"lane {profile.lane}")
    if profile.max_budget is not None:
        parts.append(f"{'refused over' if profile.refuse_over else 'at most'} {span(profile.max_budget)}")
    if profile.lanes:
        parts.append(f"only {', '.join(profile.lanes)}")
    if profile.caching:
        parts.append(f"caching {profile.caching}")
    if profile.tags:
        parts.append(" ".join(f"{name}={value}" for name, value in profile.tags.items()))
    if profile.whole_account:
        parts.append("whole account")
    return "; ".join(parts) or "no bounds"
