"""An hour of streams with drafts, a worker killed every 20 s: nothing is lost and nothing grows.

Two instances of each role; the second of each is killed again and again, so that the first ones
and the router live through it all, and their memory has a slope. `TANDEM_SOAK_SECONDS` sets
another time, `TANDEM_SOAK_SAMPLES` where the samples are kept for `tests.integration.soak_curves`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.churn import Churn
from tests.integration.cluster import Cluster
from tests.integration.oracle_load import make_loads
from tests.integration.soak_curves import (
    NUM_BLOCKS,
    Sample,
    Sampler,
    of_the_whole_run,
    read_samples,
    slope,
    slopes_of_memory,
)
from tests.processes.forked import Process, start

if TYPE_CHECKING:
    from engine.model.deepseek_v3 import DeepseekV3ForCausalLM

SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "3600"))
NUM_LANES = 8
MOST_GROWTH = 0.02
"""Of a process's memory in the whole run, that its interval must not be all above."""
MOST_MORE_FILES, MOST_MORE_THREADS = 40, 6
LIVING = {"router": "router", "prefill-0/0": "prefill-0", "decode-0/0": "decode-0"}
"""Processes that live through it all, and the instances that are never killed."""


class FreshCluster(Cluster):
    """Those whose memory is told are not forked: their pages are their own from the start."""

    def start_process(
        self, name: str, command: list[str], environment: Mapping[str, str], log: BinaryIO
    ) -> Process:
        """Start a process."""
        return start(command, environment=environment, output=log, fresh=name in LIVING)


@pytest.mark.hypothesis
@given(
    st.floats(-5, 5),
    st.floats(0, 1000),
    st.integers(NUM_BLOCKS, 500),
)
def test_the_interval_of_a_slope_has_it(per_s: float, start: float, count: int) -> None:
    times = [5.0 * index for index in range(count)]
    found, half = slope(times, [start + per_s * time for time in times])
    assert abs(found - per_s) < 1e-6
    assert half < 1e-6


def test_noise_has_no_slope_and_growth_has_one() -> None:
    times = [5.0 * index for index in range(240)]
    noise = [(index * 7919) % 101 / 10 for index in range(240)]
    found, half = slope(times, noise)
    assert abs(found) < half
    found, half = slope(times, [one + 0.05 * time for one, time in zip(noise, times, strict=True)])
    assert found - half > 0
    with pytest.raises(ValueError, match="too few"):
        slope(times[: NUM_BLOCKS - 1], noise[: NUM_BLOCKS - 1])


def test_a_process_that_was_started_again_has_no_slope() -> None:
    def sample(seconds: float, process: str, pid: int) -> Sample:
        return Sample(
            seconds=seconds, process=process, pid=pid, rss_mib=1.0, files=1, threads=1, blocks=0
        )

    samples = [sample(5.0 * n, "a", 1) for n in range(40)]
    samples += [sample(5.0 * n, "b", 2 + n // 20) for n in range(40)]
    assert list(of_the_whole_run(samples)) == ["a"]
    assert slopes_of_memory(samples) == {"a": (0.0, 0.0)}


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 900)
def test_nothing_grows_while_a_worker_is_killed_every_20_s(
    tmp_path: Path, oracle: DeepseekV3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.integration.test_churn import churn_config

    path = Path(os.environ.get("TANDEM_SOAK_SAMPLES", tmp_path / "samples.jsonl"))
    with FreshCluster(churn_config(), tmp_path / "cluster") as cluster:
        (load,) = make_loads([cluster.base_url], oracle, num_prompts=32, num_tokens=48)

        async def go_on() -> None:
            async with load.under_way(NUM_LANES):
                await asyncio.sleep(SECONDS)

        churn = Churn(
            cluster,
            None,
            decode_every_s=30.0,
            prefill_every_s=60.0,
            cut_every_s=0.0,
            spared=tuple(LIVING.values()),
        )
        with Sampler(cluster, path), churn:
            asyncio.run(go_on())
        cluster.wait_idle(120.0)
        drafted = cluster.metric("decode-0", "pd_decode_draft_tokens_total")
    assert cluster.marked_processes() == []
    samples = read_samples(path)
    slopes = slopes_of_memory(samples)
    figures = {
        "seconds": SECONDS,
        "streams": load.num_over,
        "lost": len(load.lost),
        "different": len(load.different),
        "happened": dict(churn.counts),
        "MiB an hour, +-": {name: [round(x, 1) for x in one] for name, one in slopes.items()},
    }
    with capsys.disabled():
        print(f"\nlong soak: {json.dumps(figures, indent=1)}\n")
    assert load.wrong == []
    assert drafted > 0
    assert churn.counts["decode killed"] > 0
    assert set(LIVING) <= set(slopes)
    for name, some in of_the_whole_run(samples).items():
        late = some[len(some) // 4 :]
        found, half = slopes[name]
        hours = (late[-1].seconds - late[0].seconds) / 3600
        assert (found - half) * hours < MOST_GROWTH * late[0].rss_mib, (name, found, half)
        assert late[-1].files - late[0].files <= MOST_MORE_FILES, name
        assert late[-1].threads - late[0].threads <= MOST_MORE_THREADS, name
