"""The calls that OpenAI's endpoints answer and bill, the same for synchronous calls and for lines of a batch."""

from collections.abc import Mapping
from typing import Any

from carpool.mock.core.bill import Usage
from carpool.mock.openai.answers import Answer, completion, response, usage_of
from carpool.mock.openai.cache import CacheUse, OpenAICache
from carpool.mock.openai.digest import Asked, Endpoint, digest, openai_fingerprint
from carpool.mock.openai.embeddings import embeddings, inputs_of, tokens_of
from carpool.mock.openai.plain import moderation, read_completion, read_moderation, text_completion
from carpool.mock.openai.validate import check_embeddings

PATHS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
    "/v1/completions": "completions",
    "/v1/moderations": "moderations",
}
_PREFIX: Mapping[Endpoint, str] = {
    "chat": "chatcmpl",
    "responses": "resp",
    "embeddings": "emb",
    "completions": "cmpl",
    "moderations": "modr",
}
_NOTHING = CacheUse(0, 0)


def read(endpoint: Endpoint, body: Any, mean_output: int) -> Asked:
    """Digests a decoded body; raises the provider's error for one that it refuses."""
    match endpoint:
        case "chat" | "responses":
            return digest(endpoint, body, mean_output)
        case "embeddings":
            return _embedding(body)
        case "completions":
            return read_completion(body, mean_output)
        case "moderations":
            return read_moderation(body)


def use(asked: Asked, cache: OpenAICache, now: float) -> Usage:
    """What it uses, after its traffic with the cache."""
    return usage_of(asked, _NOTHING if asked.prefixes is None else cache.use(asked.prefixes, asked.spec, now))


def name_of(asked: Asked, unique: str) -> str:
    """The answer's id; embeddings have none in their response, only on the bill."""
    return f"{_PREFIX[asked.endpoint]}_{unique}"


def answer(asked: Asked, usage: Usage, answer_id: str, created: int) -> Answer:
    match asked.endpoint:
        case "chat":
            return completion(asked, usage, answer_id, created)
        case "responses":
            return response(asked, usage, answer_id, created)
        case "embeddings":
            return embeddings(asked.body, asked.spec)
        case "completions":
            return text_completion(asked, usage, answer_id, created)
        case "moderations":
            return moderation(asked, answer_id)


def _embedding(body: Any) -> Asked:
    spec = check_embeddings(body)
    return Asked(
        spec=spec,
        model=body["model"],
        fingerprint=openai_fingerprint(body),
        text="",
        input_tokens=sum(map(tokens_of, inputs_of(body))),
        output_tokens=0,
        body=body,
        endpoint="embeddings",
    )
