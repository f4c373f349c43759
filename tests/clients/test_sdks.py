"""Clients as programs use them: chat, its stream, tools and structured output, each by one script.

    make clients-test

The answers are greedy, so a stream adds up to the whole answer; what a schema says holds, by a
grammar, for arguments and documents of a model that knows neither.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import RunClient
from tests.integration.cluster import Cluster

SCRIPTS = Path(__file__).parent / "scripts"
CLIENTS = {
    "anthropic": 1,
    "instructor": 1,
    "langchain_anthropic": 1,
    "langchain_openai": 1,
    "litellm": 1,
    "llm": 0,  # it lets no caller say that a tool has to be called
    "openai": 2,
    "openai_agents": 1,
    "pydantic_ai": 0,  # its typed outputs are calls
}
"""How many tools each of them calls."""
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


def test_every_script_is_run() -> None:
    found = {path.stem.removeprefix("with_") for path in SCRIPTS.glob("with_*.py")}
    assert found == set(CLIENTS)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_of_programs(cluster: Cluster, run_client: RunClient, client: str) -> None:
    output = run_client("python", str(SCRIPTS / f"with_{client}.py"), cluster.base_url)
    found = json.loads(output.splitlines()[-1])
    assert found["chat"]
    assert found["streamed"] == found["chat"]
    assert len(found["called"]) == CLIENTS[client]
    for arguments in found["called"]:
        assert arguments.keys() == {"color"}
        assert arguments["color"] in ("red", "blue")
    assert found["structured"]
    for answer in found["structured"]:
        assert answer.keys() == {"ok", "size"}
        assert isinstance(answer["ok"], bool)
        assert answer["size"] in ("small", "large")
