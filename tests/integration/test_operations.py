"""Rolling restarts and scaling of real workers under steady load: no stream notices.

The controller is the real one, with `tandem`'s commands; it starts processes without Ray.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.checks.cluster import resolve_config
from deploy.cli import main as tandem
from deploy.plan import Role
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.config import ClusterConfig, ClusterSection, RouterSection
from tests.deploy.control.cluster import ControlledCluster
from tests.integration.oracle_load import OracleLoad, make_loads
from tests.integration.test_drain import NUM_PROMPTS, NUM_STREAMS, NUM_TOKENS, drain_config
from tests.waiting import wait_until

ENTRYPOINTS = {
    Role.ROUTER: (sys.executable, "-m", "router"),
    Role.PREFILL: (sys.executable, "-m", "prefill"),
    Role.DECODE: (sys.executable, "-m", "tests.integration.slow_decode"),
}
SERVES = re.compile(r"(decode-\d+) serves after ([\d.]+) s")
MOST_S = 150.0
"""Ten times what a new worker may take on two cores that do nothing else."""


def config_in(folder: Path) -> ClusterConfig:
    return resolve_config(
        dataclasses.replace(
            drain_config(),
            cluster=ClusterSection(name="operated", run_dir=str(folder)),
            router=RouterSection(worker_wait_s=120.0, port=0, control_port=0),
        )
    )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ControlledCluster]:
    """Two prefill and two decode instances."""
    config = config_in(tmp_path)
    cluster = ControlledCluster(config, tmp_path, entrypoints=ENTRYPOINTS, start_s=280.0)
    with cluster.running():
        yield cluster


async def command(cluster: ControlledCluster, *words: str) -> None:
    """While the streams go on."""
    status = await asyncio.to_thread(tandem, [*words, "--config", cluster.config_file])
    assert status == 0, words


def load_on(cluster: ControlledCluster, oracle: DeepseekV3ForCausalLM) -> OracleLoad:
    url = cluster.context.endpoint.removesuffix("/v1")
    (load,) = make_loads([url], oracle, num_prompts=NUM_PROMPTS, num_tokens=NUM_TOKENS)
    return load


def busy(cluster: ControlledCluster) -> list[str]:
    """What is not back to zero, one line each."""
    url = f"{cluster.context.endpoint.removesuffix('/v1')}/status"
    with urllib.request.urlopen(url, timeout=60) as response:
        status: dict[str, Any] = json.load(response)
    held = {"num_requests_running", "num_requests_waiting", "num_quarantined_blocks"}
    lines = [f"in flight: {status['num_requests_in_flight']}"]
    lines = lines if status["num_requests_in_flight"] else []
    for worker in status["workers"]:
        load = worker["load"]
        used = load["num_total_blocks"] - load["num_free_blocks"]
        if used or any(load[name] for name in held):
            lines.append(f"{worker['instance']}: {load}")
    return lines


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_stream_notices_a_rolling_restart_of_every_worker_and_decode_from_1_to_3_to_1(
    cluster: ControlledCluster,
    oracle: DeepseekV3ForCausalLM,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def operate(streams: OracleLoad) -> None:
        async with streams.under_way(NUM_STREAMS):
            await streams.some_more(NUM_STREAMS)
            await command(cluster, "restart", "--rolling", "--deadline", "1")
            await streams.some_more(NUM_STREAMS)
            await command(cluster, "scale", "decode", "1", "--deadline", "1")
            await command(cluster, "scale", "decode", "3")
            await streams.some_more(NUM_STREAMS)
            await command(cluster, "scale", "decode", "1", "--deadline", "1")
            await streams.some_more(NUM_STREAMS)

    before = cluster.pids()
    streams = load_on(cluster, oracle)
    asyncio.run(operate(streams))
    assert streams.wrong == []
    wait_until(lambda: busy(cluster) == [], "every pool is back to zero")
    after = cluster.pids()
    assert set(before.values()) & set(after.values()) == {before["router"]}
    assert len(cluster.names("decode")) == 1
    took = [float(found[2]) for found in SERVES.finditer(capsys.readouterr().out)]
    assert len(took) >= 4
    with capsys.disabled():
        print(f"\n{streams.num_over} streams; new decode workers served after {took} s")
    assert max(took) < MOST_S


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_stream_notices_an_hour_of_operations(
    cluster: ControlledCluster, oracle: DeepseekV3ForCausalLM
) -> None:
    """Ten rounds of what an operator does in a bad week."""

    async def operate(streams: OracleLoad) -> None:
        async with streams.under_way(NUM_STREAMS):
            for _ in range(10):
                await command(cluster, "restart", "--rolling", "--deadline", "1")
                await command(cluster, "scale", "decode", "3")
                await command(cluster, "scale", "prefill", "1", "--deadline", "0")
                await streams.some_more(NUM_STREAMS)
                await command(cluster, "scale", "decode", "1", "--deadline", "0")
                await command(cluster, "scale", "prefill", "2")
                await command(cluster, "scale", "decode", "2")

    streams = load_on(cluster, oracle)
    asyncio.run(operate(streams))
    assert streams.wrong == []
    wait_until(lambda: busy(cluster) == [], "every pool is back to zero")
