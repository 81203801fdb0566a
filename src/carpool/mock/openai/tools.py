"""Which tool the OpenAI mock calls, and with which arguments. The two endpoints nest the same data differently."""

from typing import Any, NamedTuple

import msgspec

from carpool.mock.core.blocks import canonical
from carpool.mock.core.filler import arguments
from carpool.mock.openai.errors import OpenAIError, missing, wrong_type

Body = dict[str, Any]

_CALLABLE = ("function", "custom")
_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}  # `any` is Mistral's name


class ToolCall(msgspec.Struct, frozen=True):
    kind: str
    """`function` or `custom`."""
    name: str
    argument: str


class Choice(NamedTuple):
    mode: str
    """`auto`, `none` or `required`."""
    names: tuple[str, ...] = ()
    """The tools that it is narrowed to, if it is."""


def check_tools(body: Body, endpoint: str) -> None:
    for position, tool in enumerate(body.get("tools") or ()):
        where = f"tools[{position}]"
        if not isinstance(tool, dict):
            raise wrong_type(where, "an object", tool)
        if "type" not in tool:
            raise missing(f"{where}.type")
        if tool["type"] == "function":
            named = tool.get("function") if endpoint == "chat" else tool
            if not isinstance(named, dict) or not isinstance(named.get("name"), str):
                raise missing(f"{where}.function.name" if endpoint == "chat" else f"{where}.name")
    _check_choice(body)


def _check_choice(body: Body) -> None:
    choice = _choice(body.get("tool_choice"))
    if choice.mode == "required" and not body.get("tools"):
        said = "'tool_choice' is only allowed when 'tools' are specified."
        raise OpenAIError(f"Invalid value for 'tool_choice': {said}", "tool_choice")
    known = {tool["name"] for tool in _callable(body)}
    for name in choice.names:
        if name not in known:
            raise OpenAIError(f"Tool choice '{name}' not found in 'tools' parameter.", "tool_choice")


def called(body: Body, wanted: bool, snippet: str) -> ToolCall | None:
    """The call of a tool, if the user asks for one or the request forces it."""
    choice = _choice(body.get("tool_choice"))
    if choice.mode == "none" or not (wanted or choice.mode == "required"):
        return None
    tools = [tool for tool in _callable(body) if not choice.names or tool["name"] in choice.names]
    # A shell is the tool whose call a client can carry out for real.
    tools.sort(key=lambda tool: not _is_shell(tool))
    return _call(tools[0], snippet) if tools else None


def _choice(given: Any) -> Choice:
    if isinstance(given, str):
        if given not in _MODES:
            raise OpenAIError(f"Invalid value: '{given}'.", "tool_choice", "invalid_value")
        return Choice(_MODES[given])
    if not isinstance(given, dict):
        return Choice("auto")
    if given.get("type") == "allowed_tools":
        allowed = given.get("allowed_tools") or given
        names = tuple(_described(one)["name"] for one in allowed.get("tools") or () if one.get("type") in _CALLABLE)
        return Choice(_MODES.get(allowed.get("mode", "auto"), "auto"), names)
    if given.get("type") in _CALLABLE:
        return Choice("required", (str(_described(given).get("name")),))
    return Choice("auto")  # server tools are never called here


def _callable(body: Body) -> list[Body]:
    return [_described(tool) for tool in body.get("tools") or () if tool["type"] in _CALLABLE]


def _described(tool: Body) -> Body:
    return {"type": tool["type"], **tool.get(tool["type"], tool)}


def _is_shell(tool: Body) -> bool:
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return "cmd" in properties or "command" in properties


def _call(tool: Body, snippet: str) -> ToolCall:
    if tool["type"] == "custom":
        return ToolCall("custom", tool["name"], f"do {snippet}")
    return ToolCall("function", tool["name"], canonical(arguments(tool.get("parameters"), snippet)).decode())
