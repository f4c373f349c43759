"""A small cluster of the bundled model, and clients in an environment of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.clients.tool_template import model_with_tools
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(os.environ.get("TANDEM_CLIENTS", ROOT / ".venv-clients")).absolute()
"""The environment; `make clients-test` makes it, and names it from the repository's root."""
TIMEOUT_S = 560
OFFLINE = {
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DO_NOT_TRACK": "1",
    "NO_COLOR": "1",
}
RunClient = Callable[..., str]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all clients, with tools."""
    model = model_with_tools(MODEL_DIR, tmp_path_factory.mktemp("model"))
    config = ClusterConfig(
        model=ModelSection(path=str(model), name="tandem-python"),
        prefill=PrefillSection(num_blocks=64),
        decode=DecodeSection(num_blocks=64),
    )
    with Cluster(config, tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


@pytest.fixture
def run_client(tmp_path: Path) -> RunClient:
    """Run a command of the clients' environment in a folder of its own; its output comes back."""

    def run(command: str, *args: str, **variables: str) -> str:
        program = CLIENTS / "bin" / command
        assert program.exists(), f"{program} is not there; run: make clients-test"
        environment = {**os.environ, **OFFLINE, "HOME": str(tmp_path), **variables}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [program, *args],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run
