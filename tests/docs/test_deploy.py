"""The files in deploy/ name settings, flags, pages and extras that exist. No container is built here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from carpool.cli import app
from tests.support import ROOT

DEPLOY = ROOT / "deploy"
SECRETS = {
    "CARPOOL_ADMIN_TOKEN": "a" * 64,
    "CARPOOL_SECRET": "b" * 64,
    "ANTHROPIC_API_KEY": "sk-a",
    "OPENAI_API_KEY": "sk-o",
    "CARPOOL_STORE__URL": "postgresql://carpool:word@postgres/carpool",
}


def manifests() -> dict[str, dict[str, Any]]:
    found = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))
    return {one["kind"]: one for one in found}


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8")))


def served(command: list[str], folder: Path) -> None:
    """The command is one that carpool understands, with the config that it will find there. The database and the port
    are others: those of the deployment are not here."""
    words = [word.replace("/etc/carpool/", f"{DEPLOY}/") for word in command]
    store = str(folder / "carpool.db")
    made = CliRunner().invoke(app, ["keys", "add", "ci", "--store", store, "--create"], env=SECRETS)
    assert made.exit_code == 0, made.output
    result = CliRunner().invoke(app, [*words, "--check", "--store", store, "--port", "0"], env=SECRETS)
    assert result.exit_code == 0, result.output


def test_the_image_starts_carpool_with_a_config_that_holds(tmp_path: Path) -> None:
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    served(yaml.safe_load(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[-1]), tmp_path)


def test_the_image_installs_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    [asked] = re.findall(r"/source\[([a-z,]+)\]", (DEPLOY / "Containerfile").read_text("utf-8"))
    assert set(asked.split(",")) <= set(extras)


def test_what_the_image_copies_is_there() -> None:
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / "Containerfile").read_text("utf-8"), re.MULTILINE):
        assert all((ROOT / one).exists() for one in line.split())


def test_kubernetes_starts_carpool_with_a_config_that_holds(tmp_path: Path) -> None:
    [container] = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    served(container["args"], tmp_path)


def test_the_grace_time_is_longer_than_the_drain() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    args = pod["containers"][0]["args"]
    assert pod["terminationGracePeriodSeconds"] > float(args[args.index("--drain") + 1])


def test_the_service_and_the_budget_find_the_pods() -> None:
    found = manifests()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.parametrize("probe", ["readinessProbe", "livenessProbe"])
def test_probes_ask_under_an_allowed_name(probe: str) -> None:
    [container] = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    asked = container[probe]["httpGet"]
    allowed = yaml.safe_load((DEPLOY / "carpool.yaml").read_text("utf-8"))["server"]["allowed_hosts"]
    assert asked["httpHeaders"] == [{"name": "Host", "value": allowed[0]}]
    assert asked["path"] in ("/carpool/healthz", "/carpool/readyz")


def test_compose_gives_every_variable_that_the_config_names() -> None:
    given = compose()["services"]["carpool"]["environment"]
    assert set(SECRETS) <= set(given)
    assert compose()["services"]["postgres"]["environment"]["POSTGRES_USER"] in given["CARPOOL_STORE__URL"]
