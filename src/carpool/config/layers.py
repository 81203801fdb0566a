"""Merge the config file, environment variables and flags; the later wins. Errors name the origin of a key."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from carpool.config.sections import PROVIDER_KEYS, Tls
from carpool.core.errors import ConfigError
from carpool.core.settings import known, load, mapping, value_of
from carpool.planners.policy import same_setting, section_keys, sections

PREFIX = "CARPOOL_"


class Flag(NamedTuple):
    """A value from the command line: its place in the file, the value, and the flag as the user wrote it."""

    path: tuple[str, ...]
    value: object
    shown: str


@dataclass(slots=True)
class ConfigDocument:
    """The sections of a config. `names` maps keys that are not from the file to how the user wrote them."""

    sections: dict[str, object] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    lists_providers: bool = False  # whether the file has a list of providers

    def shown(self, path: str) -> str:
        return self.names.get(path, path)

    def section(self, name: str) -> Mapping[object, object]:
        return mapping(self.sections.get(name), f"The section {name}")

    def read(
        self, table: type[Any], section: str = "", content: Mapping[object, object] | None = None
    ) -> dict[str, Any]:
        """The fields of a table that are set, from `content` or the sections that they belong to."""
        values: dict[str, Any] = {}
        for setting in fields(table):
            if setting.metadata:
                path = setting.metadata["at"] or f"{section}.{setting.name}"
                where, _, key = path.rpartition(".")
                value = (self.section(where) if content is None else content).get(key)
                if value is not None:
                    values[setting.name] = setting.metadata["read"](value, self.shown(path))
        return values

    def put(self, path: tuple[str, ...], value: object, shown: str) -> None:
        """Set a key, replacing its value, and remove other keys for the same setting."""
        section, *keys = path
        if len(keys) == 1:
            for place, name in same_setting(section, keys[0]):
                self._drop(place, name)
        here: dict[Any, Any] = self.sections
        for step in path[:-1]:
            here[step] = dict(mapping(here.get(step), f"The section {step}"))
            here = here[step]
        here[path[-1]] = value
        dotted = ".".join(path)
        self.names[dotted] = self.origins[dotted] = shown

    def _drop(self, section: str, key: str) -> None:
        content = self.sections.get(section)
        if isinstance(content, Mapping) and key in content:
            self.sections[section] = {name: value for name, value in content.items() if name != key}
            self.origins.pop(f"{section}.{key}", None)


def layered(path: str | os.PathLike[str] | None, environ: Mapping[str, str], flags: Iterable[Flag]) -> ConfigDocument:
    document = _from_file(path)
    for name in sorted(environ):
        if name.startswith(PREFIX) and "__" in name.removeprefix(PREFIX):
            document.put(_place(name, document), value_of(environ[name], name), name)
    for flag in flags:
        document.put(flag.path, flag.value, flag.shown)
    return document


def _from_file(path: str | os.PathLike[str] | None) -> ConfigDocument:
    document = ConfigDocument()
    if path is None:
        return document
    file = load(path)
    document.lists_providers = bool(file.get("providers"))
    for section, content in file.items():
        document.sections[known(section, sections(), "")] = content
        for dotted in _dotted(str(section), content, depth=3):
            document.origins[dotted] = os.path.basename(os.fspath(path))  # noqa: PTH119  a name, not a place
    return document


def _dotted(path: str, content: object, depth: int) -> list[str]:
    if depth == 1 or not isinstance(content, Mapping):
        return [path]
    return [dotted for key, value in content.items() for dotted in _dotted(f"{path}.{key}", value, depth - 1)]


def _place(name: str, document: ConfigDocument) -> tuple[str, ...]:
    """The config key of an environment variable: CARPOOL_BATCHING__RPM is batching.rpm."""
    section, *keys = name.removeprefix(PREFIX).lower().split("__")
    if section not in sections():
        known(section.upper(), [allowed.upper() for allowed in sections()], PREFIX, name)
    if section == "providers" and len(keys) == 2:
        _known_key(keys[1], PROVIDER_KEYS, f"{PREFIX}PROVIDERS__{keys[0].upper()}__", name)
        return section, _provider(keys[0], document), keys[1]
    if section == "providers":
        raise ConfigError(f"{name} names no key of a provider: write CARPOOL_PROVIDERS__OPENAI__BASE_URL, for example.")
    if section == "server" and len(keys) == 2 and keys[0] == "tls":
        _known_key(keys[1], [key.name for key in fields(Tls)], f"{PREFIX}SERVER__TLS__", name)
        return section, *keys
    if section == "caching" and len(keys) == 2 and keys[0] == "keep_alive":
        _known_key(keys[1], ("max_usd_per_day",), f"{PREFIX}CACHING__KEEP_ALIVE__", name)
        return section, *keys
    allowed = section_keys(section)
    if not allowed:
        raise ConfigError(f"{name} is not a setting: the section {section} can be written in the file only.")
    key = "__".join(keys)
    _known_key(key, allowed, f"{PREFIX}{section.upper()}__", name)
    return section, key


def _known_key(key: str, allowed: Iterable[str], prefix: str, name: str) -> None:
    known(key.upper(), [candidate.upper() for candidate in allowed], prefix, name)


def _provider(written: str, document: ConfigDocument) -> str:
    """Match the provider in a variable's name, which has no dashes and no lower-case letters, to a configured one."""
    listed = map(str, document.section("providers"))
    return next((name for name in listed if name.lower().replace("-", "_") == written), written)
