"""Forced tools and structured answers: at once, streamed and in batches, judged by the SDKs and by pydantic."""

from __future__ import annotations

import json
from datetime import date, datetime
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from carpool.mock.core.filler import arguments, fill

OPENAI_MODEL = "gpt-6-luna"


class Kind(Enum):
    ROAD = "road"
    RAIL = "rail"


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    kind: Kind
    at: list[float]


class Trip(BaseModel):
    """What models of users have: nested models, lists, enumerations, options and limits."""

    model_config = ConfigDict(extra="forbid")
    title: str
    seats: int
    stops: list[Place]
    first: Place
    driver: str | None
    paid: bool
    by: Literal["car", "bus"]


class Node(BaseModel):
    value: int
    children: list[Node]
    parent: Node | None


class Limits(BaseModel):
    at: datetime
    day: date
    id: UUID
    few: Annotated[list[int], Field(min_length=3, max_length=4)]
    short: Annotated[str, Field(max_length=4)]
    long: Annotated[str, Field(min_length=200)]
    above: Annotated[int, Field(gt=6)]
    below: Annotated[float, Field(lt=1)]
    step: Annotated[int, Field(multiple_of=7, ge=8)]
    loose: dict[str, int]
    either: Place | int
    span: tuple[float, int]


@pytest.mark.parametrize("model", [Place, Trip, Node, Limits])
def test_a_made_up_value_fits_its_schema(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    model.model_validate_json(json.dumps(fill(schema, "echo:x")))
    model.model_validate_json(json.dumps(arguments(schema, "echo:x")))


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]}, "ab"),
        ({"type": ["string", "null"]}, "text"),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, "two"),
        ({"type": "array", "maxItems": 0}, "none"),
        ({"type": "object", "required": ["free"]}, "free"),
    ],
)
def test_schemas_beyond_those_that_pydantic_makes(schema: dict[str, Any], kind: str) -> None:
    defined = {"a": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
    wanted: dict[str, Any] = {
        "ab": {"a": "t", "b": 1},
        "text": "t",
        "two": [True, True],
        "none": [],
        "free": {"free": "t"},
    }
    assert fill({**schema, "$defs": defined}, "t") == wanted[kind]


def test_a_tool_that_takes_anything_gets_what_spoils_easily() -> None:
    awkward = {"query": "t", "ünïcode": '\u2028"\\', "nested": {"n": [1, 2.5, None, True]}}
    for schema in (None, {}, {"type": "object"}, {"type": "object", "properties": {}, "additionalProperties": True}):
        assert arguments(schema, "t") == awkward
    optional = {"properties": {"query": {"type": "integer"}}, "additionalProperties": True}
    assert arguments(optional, "t") == {**awkward, "query": 1}
    assert arguments({"type": "object", "properties": {}, "additionalProperties": False}, "t") == {}
    assert arguments({"type": "object", "properties": {"a": {"type": "string"}}}, "t") == {}


# ---------------------------------------------------------------- Anthropic

PLAIN = {"name": "plain", "input_schema": {"type": "object"}}
TRIP = {"name": "trip", "input_schema": Trip.model_json_schema()}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
FORMAT = {"type": "json_schema", "schema": Trip.model_json_schema()}

FORCED = {
    "tool": {"tools": [PLAIN, TRIP], "tool_choice": {"type": "tool", "name": "trip"}},
    "any": {"tools": [SEARCH, TRIP], "tool_choice": {"type": "any"}},
}
ANSWERED = {"output_config": {"output_config": {"format": FORMAT}}, "output_format": {"output_format": FORMAT}}


async def by_batch(server: Any, client: Any, params: dict[str, Any]) -> Any:
    batch = await client.messages.batches.create(requests=[{"custom_id": "c", "params": params}])
    server.provider.end_batch(batch.id)
    (line,) = [line async for line in await client.messages.batches.results(batch.id)]
    return line.result.message


async def streamed(_: Any, client: Any, params: dict[str, Any]) -> Any:
    """As the SDK puts the events together."""
    body = {key: value for key, value in params.items() if key == "output_format"}
    params = {key: value for key, value in params.items() if key not in body}
    async with client.messages.stream(**params, extra_body=body) as stream:
        return await stream.get_final_message()


async def at_once(_: Any, client: Any, params: dict[str, Any]) -> Any:
    body = {key: value for key, value in params.items() if key == "output_format"}
    return await client.messages.create(**{k: v for k, v in params.items() if k not in body}, extra_body=body)


WAYS = {"at once": at_once, "streamed": streamed, "by batch": by_batch}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", FORCED)
async def test_a_forced_tool_is_called_with_what_its_schema_allows(connected, body, how, way):
    async with connected() as (server, client):
        answer = await WAYS[way](server, client, body("A question", **FORCED[how]))
    (use,) = answer.content  # and nothing is said beside it
    assert (answer.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "trip")
    assert Trip.model_validate_json(json.dumps(use.input)).title == "A question"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ANSWERED)
async def test_an_answer_fits_the_schema_that_it_is_given(connected, body, how, way):
    async with connected() as (server, client):
        answer = await WAYS[way](server, client, body("A question", **ANSWERED[how]))
    assert answer.stop_reason == "end_turn"
    assert Trip.model_validate_json(answer.content[0].text).title.startswith("echo:")


async def test_the_sdk_parses_an_answer(connected, body):
    async with connected() as (_, client):
        answer = await client.messages.parse(**body("A question"), output_format=Trip)
    assert isinstance(answer.parsed_output, Trip)


@pytest.mark.parametrize("text", ["plain", "[tool]", "[think]", "[blocks]", "[max]"])
async def test_a_text_that_cites_nothing_has_no_citations(turned, body, text):
    """There are clients that take a list or nothing, and refuse a null."""
    world = turned()
    whole = await world.call("POST", "/v1/messages", body(text, tools=[PLAIN]))
    events = await world.call("POST", "/v1/messages", body(text, tools=[PLAIN], stream=True))
    assert b'"citations":null' not in whole.body
    assert b'"citations":null' not in events.body
    assert (b'"citations":[' in whole.body) == (text == "[blocks]")


async def test_a_tool_may_be_forbidden_and_a_refusal_calls_none(connected, body):
    async with connected() as (_, client):
        kept = await client.messages.create(**body("[tool]", tools=[PLAIN], tool_choice={"type": "none"}))
        refused = await client.messages.create(**body("[refuse]", **FORCED["tool"]))
    assert [block.type for block in (*kept.content, *refused.content)] == ["text", "text"]
    assert (kept.stop_reason, refused.stop_reason) == ("end_turn", "refusal")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [PLAIN], "tool_choice": {"type": "tool", "name": "other"}},
        {"tools": [PLAIN], "tool_choice": {"type": "tool"}},
        {"tools": [PLAIN], "tool_choice": {"type": "required"}},
        {"tools": [PLAIN], "tool_choice": "any"},
        {"tool_choice": {"type": "any"}},
    ],
)
async def test_a_choice_that_can_not_be_made_is_refused(turned, body, wrong):
    world = turned()
    answer = await world.call("POST", "/v1/messages", body(**wrong))
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["message"].startswith("tool_choice")
    assert world.provider.bill.charges == []


# ---------------------------------------------------------------- OpenAI

SCHEMA = Trip.model_json_schema()
NAMED = {"type": "function", "name": "trip"}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "plain", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "trip", "parameters": SCHEMA}},
]
TOOLS = [{"type": "function", **tool["function"], "strict": False} for tool in CHAT_TOOLS]
CHOICES = {
    "named": {"chat": {"type": "function", "function": {"name": "trip"}}, "responses": NAMED},
    "allowed": {
        "chat": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "trip"}}]},
        },
        "responses": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]},
    },
}


def asked(endpoint: str, said: str = "A question", /, **more: Any) -> dict[str, Any]:
    turns = {"messages": [{"role": "user", "content": said}]} if endpoint == "chat" else {"input": said}
    return {"model": OPENAI_MODEL, **turns, **more}


async def openai_at_once(_: Any, client: Any, endpoint: str, params: dict[str, Any]) -> Any:
    return await (client.chat.completions if endpoint == "chat" else client.responses).create(**params)


async def openai_streamed(_: Any, client: Any, endpoint: str, params: dict[str, Any]) -> Any:
    api = client.chat.completions if endpoint == "chat" else client.responses
    async with api.stream(**params) as stream:
        return await (stream.get_final_completion() if endpoint == "chat" else stream.get_final_response())


async def openai_by_batch(server: Any, client: Any, endpoint: str, params: dict[str, Any]) -> Any:
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/responses"
    line = json.dumps({"custom_id": "c", "method": "POST", "url": path, "body": params}).encode()
    file = await client.files.create(file=("in.jsonl", line), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h")
    server.provider.end_batch(batch.id)
    batch = await client.batches.retrieve(batch.id)
    told = json.loads((await client.files.content(batch.output_file_id)).text)["response"]["body"]
    kind = openai.types.chat.ChatCompletion if endpoint == "chat" else openai.types.responses.Response
    return kind.model_validate(told, strict=True)


OPENAI_WAYS = {"at once": openai_at_once, "streamed": openai_streamed, "by batch": openai_by_batch}


@pytest.mark.parametrize("way", OPENAI_WAYS)
@pytest.mark.parametrize("how", CHOICES)
@pytest.mark.parametrize("endpoint", ["chat", "responses"])
async def test_openai_a_forced_tool_is_called_with_what_its_schema_allows(openai_connected, endpoint, how, way):
    params = asked(endpoint, tools=CHAT_TOOLS if endpoint == "chat" else TOOLS, tool_choice=CHOICES[how][endpoint])
    async with openai_connected() as (server, client):
        answer = await OPENAI_WAYS[way](server, client, endpoint, params)
    if endpoint == "chat":
        (call,) = (one.function for one in answer.choices[0].message.tool_calls)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    else:
        (call,) = answer.output
    assert call.name == "trip"
    assert Trip.model_validate_json(call.arguments).title == "A question"


def formatted(endpoint: str, kind: str) -> dict[str, Any]:
    named = {"name": "trip", "schema": SCHEMA, "strict": True} if kind == "json_schema" else {}
    if endpoint == "chat":
        return {"response_format": {"type": kind, **({"json_schema": named} if named else {})}}
    return {"text": {"format": {"type": kind, **named}}}


@pytest.mark.parametrize("way", OPENAI_WAYS)
@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
@pytest.mark.parametrize("endpoint", ["chat", "responses"])
async def test_openai_an_answer_fits_the_format_that_it_is_given(openai_connected, endpoint, kind, way):
    async with openai_connected() as (server, client):
        answer = await OPENAI_WAYS[way](server, client, endpoint, asked(endpoint, **formatted(endpoint, kind)))
    text = answer.choices[0].message.content if endpoint == "chat" else answer.output_text
    TypeAdapter(Trip if kind == "json_schema" else dict[str, str]).validate_json(text)


async def test_openais_sdk_parses_answers_and_tools(openai_connected):
    tool = openai.pydantic_function_tool(Trip, name="trip")
    async with openai_connected() as (_, client):
        chat = await client.chat.completions.parse(**asked("chat"), response_format=Trip)
        response = await client.responses.parse(**asked("responses"), text_format=Trip)
        called = await client.chat.completions.parse(**asked("chat"), tools=[tool], tool_choice="required")
    assert isinstance(chat.choices[0].message.parsed, Trip)
    assert isinstance(response.output_parsed, Trip)
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Trip)


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
@pytest.mark.parametrize("wrong", ["unknown", "none given", "a word"])
async def test_openai_a_choice_that_can_not_be_made_is_refused(openai_connected, endpoint, wrong):
    tools = CHAT_TOOLS[:1] if endpoint == "chat" else TOOLS[:1]
    more = {
        "unknown": {"tools": tools, "tool_choice": CHOICES["named"][endpoint]},
        "none given": {"tool_choice": "required"},
        "a word": {"tools": tools, "tool_choice": "perhaps"},
    }[wrong]
    async with openai_connected() as (server, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await openai_at_once(server, client, endpoint, asked(endpoint, **more))
        assert caught.value.param == "tool_choice"
        assert server.provider.bill.charges == []
