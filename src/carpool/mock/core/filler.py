"""Makes up values for a JSON schema: the arguments of a tool call, or a structured answer."""

from typing import Any

Schema = dict[str, Any]

_COMMANDS = ("cmd", "command")
_SHALLOW = 6  # deeper, optional values are left out, so that recursive schemas end
_DEEPEST = 40
_ENDLESS = float("inf")
_FORMATS = {
    "date-time": "2026-01-02T03:04:05Z",
    "date": "2026-01-02",
    "time": "03:04:05Z",
    "duration": "PT1M",
    "email": "somebody@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_AWKWARD = {"ünïcode": '\u2028"\\', "nested": {"n": [1, 2.5, None, True]}}


def fill(schema: Any, text: str) -> Any:
    """A value that the schema allows; `text` where it asks for text. The same for the same schema.

    A `pattern` is ignored.
    """
    return _fill(schema, schema, text, "", 0)


def arguments(schema: Any, text: str) -> dict[str, Any]:
    """The arguments of a tool call; if the schema allows it, with values that careless re-encoding would break."""
    schema = schema if isinstance(schema, dict) else {}
    asked = fill({"type": "object", **schema}, text)
    properties, more = schema.get("properties") or {}, schema.get("additionalProperties")
    if more is True or (more is None and not properties and not asked):
        free = {"query": text, **_AWKWARD}
        asked = {name: fill(properties[name], text) if name in properties else free[name] for name in free} | asked
    return asked if isinstance(asked, dict) else {}


def _fill(schema: Any, root: Any, text: str, name: str, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return text
    if "$ref" in schema:
        return _fill(_referred(schema["$ref"], root), root, text, name, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("allOf"):
        return _fill(_merged(schema, root), root, text, name, depth + 1)
    for choice in ("anyOf", "oneOf"):
        if schema.get(choice):
            # A node of a tree is a leaf in the end.
            options = sorted(schema[choice], key=_is_nested) if depth > _SHALLOW else schema[choice]
            return _fill({**_beside(schema, choice), **options[0]}, root, text, name, depth + 1)
    kind = schema.get("type") or ("array" if "items" in schema else "object")
    return _of_type(kind[0] if isinstance(kind, list) else kind, schema, root, text, name, depth)


def _of_type(kind: Any, schema: Schema, root: Any, text: str, name: str, depth: int) -> Any:
    match kind:
        case "object":
            properties = schema.get("properties") or {}
            wanted = [*properties, *(key for key in schema.get("required") or () if key not in properties)]
            return {
                key: _fill(properties.get(key), root, text, key, depth + 1)
                for key in wanted
                if key in (schema.get("required") or ())
            }
        case "array" if name in _COMMANDS:
            return ["echo", "carpool"]
        case "array":
            return _list(schema, root, text, depth)
        case "string":
            return "echo carpool" if name in _COMMANDS else _text(schema, text)
        case "integer" | "number":
            return _number(schema)
        case "boolean":
            return True
        case _:
            return None


def _list(schema: Schema, root: Any, text: str, depth: int) -> list[Any]:
    first = schema.get("prefixItems") or ()
    least = schema.get("minItems", len(first) or (1 if depth <= _SHALLOW else 0))
    each = [*first, *[schema.get("items")] * max(0, least - len(first))]
    return [_fill(one, root, text, "", depth + 1) for one in each[: schema.get("maxItems", len(each))]]


def _text(schema: Schema, text: str) -> str:
    text = _FORMATS.get(schema.get("format", ""), text)
    return text.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength")]


def _number(schema: Schema) -> Any:
    """The smallest allowed value, at least one; or the largest, if that is smaller."""
    step = schema.get("multipleOf", 1)
    below, most = schema.get("exclusiveMaximum", _ENDLESS), schema.get("maximum", _ENDLESS)
    least = max(1, schema.get("minimum", 1), schema.get("exclusiveMinimum", 0) + step)
    value = -(-least // step) * step
    return value if value < below and value <= most else min(below - step, most) // step * step


def _merged(schema: Schema, root: Any) -> Schema:
    """`allOf` as one schema: the requirements of all its parts."""
    merged = _beside(schema, "allOf")
    for part in schema["allOf"]:
        while isinstance(part, dict) and "$ref" in part:
            part = _referred(part["$ref"], root)
        part = part if isinstance(part, dict) else {}
        properties = {**(merged.get("properties") or {}), **(part.get("properties") or {})}
        required = [*(merged.get("required") or ()), *(part.get("required") or ())]
        merged = {**merged, **part, "properties": properties, "required": required}
    return {key: value for key, value in merged.items() if value or key not in ("properties", "required")}


def _beside(schema: Schema, name: str) -> Schema:
    return {key: value for key, value in schema.items() if key != name}


def _is_nested(schema: Any) -> bool:
    return isinstance(schema, dict) and ("$ref" in schema or schema.get("type") in ("object", "array"))


def _referred(ref: str, root: Any) -> Any:
    found = root
    for part in ref.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found
