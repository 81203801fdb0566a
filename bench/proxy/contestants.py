"""Who is compared, how each is installed and started, and on which of its endpoints it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import before
from bodies import MODELS
from servers import Trouble, reverse_proxy

HERE = Path(__file__).resolve().parent
ENVS = HERE.parents[1] / ".venvs"
RULES = HERE / "carpool.yaml"
MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"

Start = Callable[[Path, int, str], list[str]]  # folder of its own, port, the provider's URL


@dataclass(frozen=True)
class Contestant:
    name: str
    path: str
    start: Start
    packages: tuple[str, ...] = ()  # none: nothing to install, or carpool's own environment
    env: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return ENVS / self.name / "bin" / "python" if self.packages else Path(sys.executable)

    @property
    def surroundings(self) -> dict[str, str]:
        """What the contestant's processes inherit: no key and no proxy of whoever runs this."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        return kept | self.env


def carpool(folder: Path, port: int, upstream: str) -> list[str]:
    program = [str(Path(sys.executable).with_name("carpool")), "serve", "--port", str(port), "--upstream", upstream]
    return [*program, "--store", str(folder / "carpool.db"), "--config", str(RULES)]


def without_rules(folder: Path, port: int, upstream: str) -> list[str]:
    return carpool(folder, port, upstream)[:-2]


def litellm(folder: Path, port: int, upstream: str) -> list[str]:
    config = folder / "litellm.yaml"
    model = {"model": f"openai/{MODELS[CHAT]}", "api_base": f"{upstream}/v1", "api_key": "bench"}
    listed = {"model_name": MODELS[CHAT], "litellm_params": model}
    settings = {"model_list": [listed], "litellm_settings": {"telemetry": False}}
    config.write_text(json.dumps(settings), "utf-8")  # JSON is YAML
    program = str(ENVS / "litellm" / "bin" / "litellm")
    return [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


def autobatcher(folder: Path, port: int, upstream: str) -> list[str]:
    program = [str(ENVS / "autobatcher" / "bin" / "autobatcher"), "serve", "--port", str(port)]
    return [*program, "--base-url", f"{upstream}/v1", "--api-key", "bench"]


CONTESTANTS = (
    Contestant("nginx", MESSAGES, reverse_proxy),
    Contestant("carpool", MESSAGES, carpool),
    Contestant(
        "litellm",
        CHAT,  # the quicker of the two there
        litellm,
        ("litellm[proxy]==1.106.2",),
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
        | {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"},
    ),
    Contestant("autobatcher", CHAT, autobatcher, ("autobatcher[serve]==0.12.0",)),
)


def earlier(folder: Path) -> Contestant:
    """carpool as an earlier commit had it, with that commit's rules."""

    def start(own: Path, port: int, upstream: str) -> list[str]:
        program = [str(before.python(folder).with_name("carpool")), *carpool(own, port, upstream)[1:-1]]
        return [*program, str(folder / "bench" / "proxy" / "carpool.yaml")]

    return Contestant(before.BEFORE, MESSAGES, start)


def prepare(contestant: Contestant, say: Callable[[str], None]) -> None:
    """An environment of its own, from the package index; once."""
    ready = ENVS / contestant.name / ".ready"
    wanted = "\n".join(contestant.packages)
    if not wanted or (ready.exists() and ready.read_text("utf-8") == wanted):
        return
    say(f"Setting up {contestant.name} ...")
    ENVS.mkdir(exist_ok=True)
    (ENVS / ".gitignore").write_text("*\n", "utf-8")
    if not contestant.python.exists():
        venv.create(ENVS / contestant.name, with_pip=True)
    pip = [str(contestant.python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *contestant.packages], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Trouble(
            f"{contestant.name} can't be installed ({' '.join(contestant.packages)}): {done.stderr.strip()[-500:]}\n"
            "Mend that, or leave it out by naming the others: --only nginx carpool"
        )
    ready.write_text(wanted, "utf-8")


def versions(contestant: Contestant) -> str:
    if contestant.name == "nginx":
        out = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
        return out.strip().rpartition("/")[2]
    name = contestant.name.removesuffix("-before")
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([contestant.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
