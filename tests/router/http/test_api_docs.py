"""docs/use/api.md: every endpoint has an example, and each example runs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.api_docs import DOCUMENT, path_of, routes
from tests.router.conftest import MODEL, SPECIAL, Cluster, StartRouter, write_model
from tests.router.http.test_tools import MARKS
from tests.router.text import templates

TEXT = DOCUMENT.read_text(encoding="utf-8")
BASE = "http://127.0.0.1:8000"
SHELL, PYTHON = (re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL) for kind in ("sh", "python"))
pytestmark = pytest.mark.slow


@pytest.fixture
async def cluster(start_router: StartRouter, tmp_path: Path) -> Cluster:
    write_model(tmp_path, template=templates.HERMES, special=[*SPECIAL, *MARKS])
    cluster = await start_router(tmp_path, cors_origins="https://chat.example")
    await cluster.add_pair()
    return cluster


async def output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, (command, output)
    return output.decode()


def test_every_endpoint_has_an_example() -> None:
    called = re.findall(rf"{BASE}(/[^ \"'\n]*)", "".join(SHELL))
    for route in routes():
        pattern = re.escape(path_of(route)).replace(r"\{model\}", ".+")
        assert any(re.fullmatch(pattern, path) for path in called), route.path


@pytest.mark.parametrize("block", SHELL, ids=range(len(SHELL)))
async def test_each_command_is_answered(cluster: Cluster, block: str) -> None:
    commands = "".join(
        line for line in block.splitlines(keepends=True) if not line.startswith("tandem ")
    )
    here = commands.replace(BASE, cluster.url).replace("tandem-python", MODEL)
    output = await output_of("bash", "-ec", here.replace("curl -s", "curl --fail-with-body -s"))
    assert output


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
async def test_each_program_runs(cluster: Cluster, block: str) -> None:
    program = block.replace(BASE, cluster.url).replace("tandem-python", MODEL)
    assert await output_of(sys.executable, "-c", program)
