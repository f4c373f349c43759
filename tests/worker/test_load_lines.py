"""The line of the log that says what a rank did."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry

from decode.metrics import DecodeMetrics
from prefill.metrics import PrefillMetrics
from runtime.pb import registry_pb2
from worker.load_lines import load_line, num_tokens, tell_load

BUSY = registry_pb2.WorkerLoad(
    num_requests_running=3, num_requests_waiting=1, num_free_blocks=70, num_total_blocks=100
)


def test_tokens_of_either_role_are_counted() -> None:
    prefill, decode = CollectorRegistry(), CollectorRegistry()
    PrefillMetrics(prefill).stepped(100, 0.1)
    metrics = DecodeMetrics(decode)
    metrics.stepped(3, 3, 0.1)
    metrics.stepped(4, 4, 0.1)
    assert num_tokens(prefill) == 100
    assert num_tokens(decode) == 7
    assert num_tokens(CollectorRegistry()) == 0


def test_a_line_says_load_and_speed() -> None:
    line = load_line(BUSY, 1234.0, 10.0)
    assert line == "load of the last 10 s running=3 waiting=1 kv_used=30.0% tokens_per_s=123.4"
    assert load_line(registry_pb2.WorkerLoad(), 5.0, 10.0).endswith("kv_used=0.0% tokens_per_s=0.5")


def test_nothing_is_said_of_nothing() -> None:
    idle = registry_pb2.WorkerLoad(num_free_blocks=70, num_total_blocks=100)
    assert load_line(idle, 0.0, 10.0) == ""


async def test_lines_come_until_the_worker_ends(caplog: pytest.LogCaptureFixture) -> None:
    told = asyncio.Event()

    def load() -> registry_pb2.WorkerLoad:
        told.set()
        return BUSY

    with caplog.at_level(logging.INFO):
        task = asyncio.create_task(tell_load(CollectorRegistry(), load, interval_s=0.01))
        async with asyncio.timeout(60):
            await told.wait()
            while not caplog.records:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert "running=3" in caplog.records[0].getMessage()
