"""Experts move every few steps while workers are killed: no stream is lost, none has another text.

Prompts of two kinds come in turns, so that popular experts change and plans go on. The long ones
are `make soak` (ten minutes each, `TANDEM_SOAK_SECONDS` sets another time); a run of seconds is a
test of clusters.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.config import ClusterConfig, DecodeSection
from tests.integration.churn import Churn, LinkedCluster
from tests.integration.oracle_load import OracleLoad, make_loads
from tests.integration.test_churn import churn_config
from tests.waiting import wait_until

SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "600"))
NUM_PROMPTS = 24
NUM_TOKENS = 48
CONCURRENCY = 12
STREAMS_A_TURN = 36
COUNTED = ("plans", "rounds", "moves", "host_moves", "retreats")


def moving_config(num_ranks: int, host_gib: float) -> ClusterConfig:
    return replace(
        churn_config(),
        decode=DecodeSection(
            instances=2,
            dp=num_ranks,
            num_blocks=192,
            num_redundant_experts=num_ranks,
            rebalance_experts="on",
            rebalance_interval_steps=20,
            rebalance_objective="rows",
            rebalance_min_gain=0.0,
            rebalance_host_gib=host_gib,
        ),
    )


def of_two_kinds(load: OracleLoad) -> list[OracleLoad]:
    """Loads of the even prompts and of the odd ones."""
    return [
        replace(
            load,
            prompts=load.prompts[kind::2],
            expected=load.expected[kind::2],
            seconds=[],
            lost=[],
            different=[],
        )
        for kind in (0, 1)
    ]


async def run_in_turns(loads: list[OracleLoad], seconds: float) -> None:
    """At least one turn of each."""
    end = time.monotonic() + seconds
    while True:
        for load in loads:
            await load.run(STREAMS_A_TURN, CONCURRENCY)
        if time.monotonic() >= end:
            return


def counted(cluster: LinkedCluster) -> Counter[str]:
    """What the first ranks of both instances count, since they were started."""
    totals: Counter[str] = Counter()
    for instance in ("decode-0", "decode-1"):
        for name in COUNTED:
            metric = f"pd_expert_rebalance_{name}_total"
            totals[name] += int(cluster.metric(instance, metric, rank=0))
    return totals


def run_moving_soak(
    folder: Path,
    oracle: DeepseekV3ForCausalLM,
    *,
    num_ranks: int,
    seconds: float,
    kill_s: float,
    host_gib: float = 0.0,
) -> None:
    cluster = LinkedCluster(moving_config(num_ranks, host_gib), folder)
    with cluster:
        [load] = make_loads(
            [cluster.base_url], oracle, num_prompts=NUM_PROMPTS, num_tokens=NUM_TOKENS
        )
        kinds = of_two_kinds(load)
        asyncio.run(run_in_turns(kinds, 0.0))
        undisturbed = counted(cluster)
        with Churn(
            cluster, None, decode_every_s=kill_s, prefill_every_s=2.5 * kill_s, cut_every_s=0
        ) as churn:
            asyncio.run(run_in_turns(kinds, seconds))
        # Whoever was started last has moved experts, too.
        wait_until(lambda: len(cluster.status()["workers"]) == 2 * num_ranks + 2, "all ranks", 120)
        asyncio.run(run_in_turns(kinds, 0.0))
        cluster.wait_idle(120.0)
        since_start = counted(cluster)
        figures = {
            "ranks": num_ranks,
            "host_gib": host_gib,
            "seconds": seconds,
            "streams": sum(len(kind.seconds) for kind in kinds),
            "lost": sum(len(kind.lost) for kind in kinds),
            "different": sum(len(kind.different) for kind in kinds),
            "happened": dict(churn.counts),
            "undisturbed": dict(undisturbed),
            "since the last start": dict(since_start),
        }
        print(f"\nmoving experts: {json.dumps(figures, indent=1)}\n")
        assert [kind.lost for kind in kinds] == [[], []]
        assert [kind.different for kind in kinds] == [[], []]
        assert churn.counts["decode killed"] >= 1
        assert undisturbed["moves"] > 0
        assert since_start["moves"] > 0
        assert bool(undisturbed["host_moves"]) == bool(host_gib)
    assert cluster.marked_processes() == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_no_stream_is_lost_while_experts_move_and_workers_die(
    tmp_path: Path, oracle: DeepseekV3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        run_moving_soak(tmp_path, oracle, num_ranks=2, seconds=20.0, kill_s=8.0)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 900)
@pytest.mark.parametrize(("num_ranks", "host_gib"), [(2, 0.0), (4, 0.0), (2, 0.5)])
def test_minutes_of_moving_experts_and_dying_workers(
    tmp_path: Path,
    oracle: DeepseekV3ForCausalLM,
    capsys: pytest.CaptureFixture[str],
    num_ranks: int,
    host_gib: float,
) -> None:
    with capsys.disabled():
        run_moving_soak(
            tmp_path,
            oracle,
            num_ranks=num_ranks,
            seconds=SECONDS,
            kill_s=20.0,
            host_gib=host_gib,
        )
