"""What workers export, cut to a window; and what a cache's folder says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from bench.pair.compiled import CompiledKernels
from bench.pair.watch import Snapshot, Watch, describe_workers, sum_values
from decode.metrics import DecodeMetrics
from prefill.messages import LoopLoad
from prefill.metrics import PrefillMetrics
from runtime.metrics.core import MetricsServer, render_metrics
from runtime.net.credentials import Listen
from runtime.pb import registry_pb2
from worker.lifecycle import DecodeStatus


def test_what_is_no_exposition_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"\w"):
        sum_values(['a{b="c'])


class Workers:
    """The metrics of one prefill worker and two decode ranks."""

    def __init__(self) -> None:
        self.registries = [CollectorRegistry() for _ in range(3)]
        self.prefill = PrefillMetrics(self.registries[0])
        self.decode = [DecodeMetrics(registry) for registry in self.registries[1:]]
        self.load = LoopLoad(
            num_waiting=0,
            num_running=0,
            num_sending=0,
            num_tokens_waiting=0,
            num_free_blocks=0,
            num_total_blocks=0,
        )
        self.prefill.watch(lambda: self.load, lambda: 0)

    def hold(self, *, running: int, free: int) -> None:
        """Have each decode rank run so many requests."""
        for rank in self.decode:
            rank.set_load(
                {DecodeStatus.RUNNING: running}, registry_pb2.WorkerLoad(num_free_blocks=free)
            )

    def snapshot(self, moment: float) -> Snapshot:
        texts = [render_metrics(registry).decode() for registry in self.registries]
        return Snapshot(moment, sum_values(texts))


def test_queues_are_averaged_and_steps_are_those_of_the_window() -> None:
    workers = Workers()
    workers.prefill.stepped(8192, 100.0)  # before the window
    found = []
    for second, running in enumerate((0, 10, 20, 30, 0)):
        workers.hold(running=running, free=100 - running)
        found.append(workers.snapshot(float(second)))
        for rank in workers.decode:
            rank.stepped(running, running, 0.02)
            rank.step_waited(0.001)
            rank.drafts.verified(2, 1 if second % 2 else 0)
            rank.drafts.stepped(2)
        workers.prefill.stepped(1024, 0.25)
    figures = describe_workers(found, (0.5, 3.5), num_decode_ranks=2)
    decode, prefill = figures["decode"], figures["prefill"]
    assert isinstance(decode, dict)
    assert isinstance(prefill, dict)
    assert decode["running"] == pytest.approx(40)
    assert decode["requests_per_step"] == pytest.approx(15)
    assert decode["step_ms"] == pytest.approx(20)
    assert decode["gap_ms"] == pytest.approx(1)
    assert decode["steps_per_s"] == pytest.approx(1)
    assert decode["least_free_blocks"] == 140
    assert decode["accept_length"] == pytest.approx(1.5)
    assert prefill["tokens_per_step"] == pytest.approx(1024)
    assert prefill["step_ms"] == pytest.approx(250)
    assert prefill["steps_per_s"] == pytest.approx(1)
    assert prefill["busy"] == pytest.approx(0.25)
    assert prefill["gap_ms"] is None, "none was measured"


def test_a_window_without_two_snapshots_says_nothing() -> None:
    workers = Workers()
    assert describe_workers([], (0.0, 1.0), num_decode_ranks=1) == {}
    one = [workers.snapshot(0.5), workers.snapshot(2.0)]
    assert describe_workers(one, (0.0, 1.0), num_decode_ranks=1) == {}


async def test_workers_are_read_while_they_all_answer() -> None:
    workers = Workers()
    workers.hold(running=3, free=1)
    servers = [MetricsServer(registry) for registry in workers.registries]
    listen = Listen(bind="127.0.0.1")
    addresses = [f"127.0.0.1:{await server.start(listen)}" for server in servers]
    watch, deaf = Watch(addresses), Watch([*addresses, "127.0.0.1:1"])
    tasks = [asyncio.create_task(item.run()) for item in (watch, deaf)]
    async with asyncio.timeout(60):
        while not watch.snapshots:
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for server in servers:
        await server.stop()
    assert watch.snapshots[0].values["pd_decode_num_requests:running"] == 6
    assert deaf.snapshots == []


def test_kernels_that_come_are_found_once(tmp_path: Path) -> None:
    (tmp_path / "triton" / "ab").mkdir(parents=True)
    (tmp_path / "triton" / "ab" / "_place.cubin").touch()
    kernels = CompiledKernels(tmp_path)
    assert kernels.take() == []
    (tmp_path / "triton" / "ab" / "_count.cubin").touch()
    (tmp_path / "triton" / "ab" / "_count.json").touch()
    assert kernels.take() == ["triton/ab/_count.cubin"]
    assert kernels.take() == []
    assert CompiledKernels(None).take() == []
    assert CompiledKernels(tmp_path / "not yet").take() == []
