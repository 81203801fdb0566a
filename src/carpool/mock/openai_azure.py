"""How Azure shows the same batch: what clients written for OpenAI alone trip over."""

from typing import Any

from carpool.mock.clock import rfc3339

_CODES = {"invalid_url": "url_mismatch", "mismatched_model": "model_mismatch"}


def as_azure(view: dict[str, Any]) -> dict[str, Any]:
    """States with a capital, times as text, no counts, and codes of its own."""
    told = {name: _text(value) if name.endswith("_at") else value for name, value in view.items()}
    if view["errors"] is not None:
        data = [{**one, "code": _CODES.get(one["code"], one["code"])} for one in view["errors"]["data"]]
        told["errors"] = {"object": "list", "data": data}
    return {**told, "status": str(view["status"]).capitalize(), "request_counts": None}


def _text(at: int | None) -> str | None:
    return None if at is None else rfc3339(at)
