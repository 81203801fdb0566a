"""State shared by the endpoints: time, random numbers, workspaces, the bill."""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from carpool.mock.anthropic.digest import Digest, Failure
from carpool.mock.anthropic.intake import Intake
from carpool.mock.anthropic.message_batch import MessageBatch
from carpool.mock.anthropic.workspace import Workspace
from carpool.mock.core.bill import Bill, Kind
from carpool.mock.core.clock import Now, rfc3339
from carpool.mock.core.config import MockConfig
from carpool.mock.core.dice import dice
from carpool.mock.core.errors import ApiError
from carpool.mock.core.faults import BEFORE_SYNC, FaultBox
from carpool.mock.core.http import Reply, Request
from carpool.mock.core.latency import Latency
from carpool.mock.core.limits import TokenBucket, retry_after
from carpool.mock.core.shelf import Shelf
from carpool.mock.core.strangers import stranger_contents, stranger_requests
from carpool.mock.openai.batch import OpenAIBatch
from carpool.mock.openai.hooks import Hooks
from carpool.mock.openai.intake import Contents, OpenAIIntake
from carpool.mock.openai.orders import Order
from carpool.mock.openai.project import Project

GARBAGE = Reply(200, b"<html>502 Bad Gateway</html>", {"content-type": "text/html"})
MOST_ARRIVALS = 200_000
VERSIONS = frozenset({"2023-06-01", "2026-10-21"})


@dataclass(frozen=True, slots=True)
class Caller:
    credential: str
    workspace: Workspace


@dataclass(slots=True)
class Arrival:
    """A synchronous call and its result: accepted (200), or refused with this status."""

    at: float
    credential: str
    status: int


class Seen:
    """Counts the requests that arrived, including refused ones."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, endpoint: str, credential: str) -> None:
        self._counts[endpoint, credential] += 1

    def count(self, endpoint: str | None = None, credential: str | None = None) -> int:
        return sum(
            number
            for (where, who), number in self._counts.items()
            if endpoint in (None, where) and credential in (None, who)
        )

    def __repr__(self) -> str:
        return f"Seen({dict(self._counts)})"

    def as_dict(self) -> dict[tuple[str, str], int]:
        return dict(self._counts)


class State:
    def __init__(self, config: MockConfig, now: Now) -> None:
        self.config = config
        self.now = now
        self.dice = dice(config.seed)
        self.box = FaultBox(config.faults, self.dice.faults)
        self.bill = Bill()
        self.strangers_bill = Bill()
        self.seen = Seen()
        self.canceled: list[str] = []
        self.arrivals: deque[Arrival] = deque(maxlen=MOST_ARRIVALS)
        self.workspaces: dict[str, Workspace] = {}
        self.intake = Intake(config, self.dice.batches, self.box)
        self.projects: dict[str, Project] = {}
        self.openai_intake = OpenAIIntake(config, self.dice.openai, self.box)
        self.hooks = Hooks(config.openai, self.box, self.dice.hooks, now)

    def new_id(self, prefix: str) -> str:
        return f"{prefix}_{self.dice.ids.getrandbits(96):024x}"

    def new_file_id(self) -> str:
        return f"file-{self.dice.files.getrandbits(96):024x}"

    # -- authentication

    def caller(self, request: Request) -> Caller:
        """The authenticated caller; raises 401 or 400 as the provider does."""
        credential = credential_of(request)
        if not credential:
            raise ApiError("authentication_error", "x-api-key header is required")
        if self.config.keys is not None and credential not in self.config.keys:
            raise ApiError("authentication_error", "invalid x-api-key")
        version = request.headers.get("anthropic-version")
        if version is None:
            raise ApiError("invalid_request_error", "anthropic-version: header is required")
        if version not in VERSIONS:
            raise ApiError("invalid_request_error", f"anthropic-version: {version} is not a valid version")
        return Caller(credential, self.workspace(credential))

    def workspace(self, credential: str) -> Workspace:
        own = f"wrkspc_{sha256(credential.encode()).hexdigest()[:16]}"
        name = self.config.workspaces.get(credential, own)
        if name not in self.workspaces:
            self.workspaces[name] = Workspace(name, self.config, self.bill, self.strangers_bill, self.now())
        return self.workspaces[name]

    def project(self, caller: Caller) -> Project:
        """What OpenAI calls the workspace."""
        name = caller.workspace.id
        if name not in self.projects:
            self.projects[name] = Project(
                name, self.config, self.bill, self.strangers_bill, self.now(), self.hooks.announce
            )
        return self.projects[name]

    async def enter(self, caller: Caller) -> None:
        """Shared by all batch endpoints: permission, the rate limit, and the response time."""
        if caller.credential in self.config.keys_without_batch:
            raise ApiError("permission_error", "Your API key does not have permission to use batches.")
        self.limit(caller, "batch")
        await asyncio.sleep(self.config.control_latency.draw(self.dice.control))

    # -- time

    def sync_s(self, fingerprint: str, latency: Latency) -> float:
        """How long this request's synchronous answer takes, if it begins now."""
        own = self.config.request_latencies
        return latency.draw(self.dice.sync) if own is None else own.sync_s(fingerprint, self.now())

    # -- limits

    def limit(self, caller: Caller, kind: Kind) -> None:
        wait = self.bucket(caller, kind).take(self.now())
        if wait > 0:
            message = "This request would exceed your rate limit of requests per minute."
            raise ApiError("rate_limit_error", message, {"retry-after": retry_after(wait)})

    async def arrive(self, caller: Caller) -> Arrival:
        """Accepts a synchronous call, or fails it as limits and faults say, and records it."""
        at = self.now()
        try:
            self.storm(caller)
            self.limit(caller, "sync")
            await self.box.strike(BEFORE_SYNC, accepted=False)
        except ApiError as error:
            self.arrivals.append(Arrival(at, caller.credential, error.status))
            raise
        arrival = Arrival(at, caller.credential, 200)
        self.arrivals.append(arrival)
        return arrival

    def storm(self, caller: Caller) -> None:
        """A burst of 429s: while it lasts, all requests in the workspace are refused, whatever is left of the limit."""
        now, faults = self.now(), self.box.faults
        if now >= caller.workspace.storm_until and self.box.roll("sync_429_burst"):
            caller.workspace.storm_until = now + faults.burst_s
        if now < caller.workspace.storm_until:
            headers = {"retry-after": str(faults.retry_after_s)} if faults.retry_after_s else {}
            raise ApiError("rate_limit_error", "This request would exceed your rate limit.", headers)

    def bucket(self, caller: Caller, kind: Kind) -> TokenBucket:
        return caller.workspace.batch_bucket if kind == "batch" else caller.workspace.sync_bucket

    def limit_headers(self, caller: Caller, kind: Kind) -> dict[str, str]:
        bucket, now = self.bucket(caller, kind), self.now()
        reset = rfc3339(bucket.full_at(now) + self.config.faults.clock_offset_s)
        headers = {
            "anthropic-workspace-id": caller.workspace.id,
            "anthropic-ratelimit-requests-limit": str(bucket.limit),
            "anthropic-ratelimit-requests-remaining": str(bucket.remaining(now)),
            "anthropic-ratelimit-requests-reset": reset,
        }
        for family, most in (("tokens", 2_400_000), ("input-tokens", 2_000_000), ("output-tokens", 400_000)):
            headers[f"anthropic-ratelimit-{family}-limit"] = str(most)
            headers[f"anthropic-ratelimit-{family}-remaining"] = str(most)
            headers[f"anthropic-ratelimit-{family}-reset"] = reset
        return headers

    # -- batches

    def accept(self, caller: Caller, custom_ids: Sequence[str], requests: Sequence[Digest | Failure]) -> MessageBatch:
        now, workspace = self.now(), caller.workspace
        workspace.advance(now)
        batch = self.intake.make(workspace.id, caller.credential, custom_ids, requests, now)
        workspace.add(batch)
        if self.box.roll("stranger"):
            self.add_stranger(workspace, len(custom_ids))
        return batch

    def add_stranger(self, workspace: Workspace, size: int) -> MessageBatch:
        ids, requests = stranger_requests(size, self.config.mean_output_tokens)
        batch = self.intake.make(workspace.id, "stranger", ids, requests, self.now(), stranger=True)
        workspace.add(batch)
        return batch

    def accept_openai(
        self,
        caller: Caller,
        contents: Contents,
        order: Order,
        *,
        keep_files_s: float | None,
    ) -> OpenAIBatch:
        now, project = self.now(), self.project(caller)
        project.advance(now)
        batch = self.openai_intake.make(
            project.id,
            caller.credential,
            contents,
            order,
            now,
            keep_files_s=keep_files_s,
        )
        project.add(batch)
        if self.box.roll("stranger"):
            self.add_openai_stranger(project, max(1, batch.size))
        self.hooks.stir()
        return batch

    def add_openai_stranger(
        self, project: Project, size: int, metadata: Mapping[str, str] | None = None
    ) -> OpenAIBatch:
        contents = stranger_contents(size, self.config.mean_output_tokens)
        order = Order(self.new_file_id(), "/v1/chat/completions", metadata=metadata, name=(metadata or {}).get("name"))
        batch = self.openai_intake.make(
            project.id,
            "stranger",
            contents,
            order,
            self.now(),
            stranger=True,
        )
        project.add(batch)
        return batch

    def shelves(self) -> list[Shelf[Any]]:
        return [*self.workspaces.values(), *self.projects.values()]

    def advance(self) -> None:
        now = self.now()
        for shelf in self.shelves():
            shelf.advance(now)

    def next_end(self) -> float | None:
        """Advances to the current time, and returns when OpenAI's next batch will end."""
        self.advance()
        ends = (project.next_end() for project in self.projects.values())
        return min((end for end in ends if end is not None), default=None)


def credential_of(request: Request) -> str:
    """The key, from any of the headers that clients send it in."""
    key = request.headers.get("x-api-key") or request.headers.get("api-key", "")
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return key or (token.strip() if scheme.lower() == "bearer" else "")
