"""GET /v1/models."""

from carpool.mock.anthropic.models import CATALOGUE, find_model, model_info
from carpool.mock.core.errors import ApiError
from carpool.mock.core.http import Reply, Request, json_reply
from carpool.mock.core.state import Caller, State


async def listing(state: State, caller: Caller, request: Request) -> Reply:
    """One page always suffices: the catalogue is short."""
    data = [model_info(spec) for spec in CATALOGUE.values()]
    return json_reply({"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]})


async def retrieve(state: State, caller: Caller, request: Request, model_id: str) -> Reply:
    spec = find_model(model_id)
    if spec is None:
        raise ApiError("not_found_error", f"model: {model_id}")
    return json_reply(model_info(spec))
