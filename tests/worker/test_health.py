"""What /health says, and that it says it of every thread that a request waits for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from tests.decode.cluster import run_cluster
from tests.kv_transfer.helpers import PrefillSide
from tests.prefill.fakes import Clock
from tests.waiting import wait_until
from tests.worker.fakes import FakeDriver, hosted
from tests.worker.test_step_loop import make_loop
from worker.health import MAX_LAG_S, MAX_TURN_S, Health, thread_check

DEAD = "its thread has ended"
dies_on_purpose = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def die(*_: object) -> Any:
    raise RuntimeError("a bug")


async def get_health(metrics_address: str) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{metrics_address}/health") as response,
    ):
        return response.status, await response.json()


async def test_a_worker_is_healthy_until_a_part_says_what_is_wrong() -> None:
    problem = ""
    async with hosted(FakeDriver()) as (host, registry):
        address = registry.records[0].metrics_address
        host.health.add("antenna", lambda: problem)
        status, body = await get_health(address)
        assert (status, body["status"]) == (200, "ok")
        assert body["parts"] == {"event_loop": "ok", "registration": "ok", "antenna": "ok"}
        problem = "bent"
        status, body = await get_health(address)
        assert (status, body["status"], body["parts"]["antenna"]) == (503, "failed", "bent")
        labels = {"part": "antenna"}
        assert host.registry.get_sample_value("pd_worker_healthy", labels) == 0
        assert host.registry.get_sample_value("pd_worker_healthy", {"part": "event_loop"}) == 1


@dies_on_purpose
async def test_a_dead_receiver_shows_in_the_health_of_a_decode_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_cluster() as cluster:
        address = cluster.registry.records[0].metrics_address
        status, body = await get_health(address)
        assert status == 200
        assert body["parts"].keys() >= {"engine_loop", "steps", "receiver", "registration"}
        transport = cluster.driver._transfer.transport
        monkeypatch.setattr(transport, "notifications", die)
        receiver = cluster.driver._transfer.receiver
        receiver._wake()
        while receiver.is_alive:
            await asyncio.sleep(0.01)
        status, body = await get_health(address)
        assert (status, body["parts"]["receiver"]) == (503, DEAD)
        assert body["parts"]["engine_loop"] == "ok"


@dies_on_purpose
def test_a_dead_sender_lane_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = PrefillSide(num_threads=2)
    check = thread_check(lambda: prefill.sender.is_alive)
    assert check() == ""
    lane = prefill.sender._lanes[1]
    monkeypatch.setattr(lane, "_time_to_next", die)
    lane._wake()
    wait_until(lambda: not lane.is_alive)
    assert check() == DEAD
    prefill.close()


def test_a_turn_that_takes_too_long_shows_and_a_rest_does_not() -> None:
    clock, hold, entered = Clock(), threading.Event(), threading.Event()
    loop, driver = make_loop(clock=clock)
    health = Health(CollectorRegistry())
    health.watch_loop(loop)
    assert health.report()["engine_loop"] == DEAD
    loop.start()
    wait_until(lambda: not health.report()["engine_loop"])
    wait_until(lambda: driver.num_rests > 0)
    clock.now += 2 * MAX_TURN_S
    assert health.report()["engine_loop"] == "", "nobody has work"

    def step() -> None:
        entered.set()
        assert hold.wait(60)

    driver.on_launch = step
    loop.submit(lambda: driver.work.append(1))
    assert entered.wait(60)
    assert health.report()["engine_loop"] == ""
    clock.now += 2 * MAX_TURN_S
    assert health.report()["engine_loop"] == "has work, and is in one turn for 120 s"
    hold.set()
    wait_until(lambda: not driver.work and not health.report()["engine_loop"])
    assert loop.stop(60)
    assert health.report()["engine_loop"] == DEAD


async def test_an_event_loop_that_is_held_up_shows() -> None:
    clock, registry = Clock(), CollectorRegistry()
    health = Health(registry, clock)
    probing = asyncio.ensure_future(health.watch_event_loop())
    await asyncio.sleep(0)
    assert health.report() == {"event_loop": ""}
    clock.now += 2 * MAX_LAG_S
    assert health.report() == {"event_loop": "held up for 9.5 s"}
    assert registry.get_sample_value("pd_worker_event_loop_lag_seconds") == 9.5
    probing.cancel()
