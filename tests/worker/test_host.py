"""A rank's process from its boot to its end, whatever ends it."""

from __future__ import annotations

import asyncio
import gc

import aiohttp
import pytest

from deploy.ports import free_port
from runtime.errors import ConfigError, InternalError, PeerLostError
from runtime.net.credentials import Listen
from runtime.pb import registry_pb2
from tests.decode.cluster import HOST
from tests.worker.fakes import FakeDriver, hosted
from worker.host import DRAIN_SHARE, FOLLOW_GRACE_S, STOP_TIMEOUT_S


async def test_what_it_opened_is_closed_last_things_first() -> None:
    driver = FakeDriver()
    async with hosted(driver) as (host, registry):
        assert driver.log == ["build", "settle", "start", "serve"]
        (record,) = registry.records
        assert (record.identity.epoch, record.max_model_len, record.num_parts) == (5, 64, 3)
        driver.log.clear()
        await host.drain()
        assert driver.log == ["refuse", f"drain {DRAIN_SHARE * host.grace_s:g}"]
        driver.log.clear()
    assert driver.log[:3] == ["refuse", "stop", "flush"]
    assert driver.log[-3:] == ["close role", "close transfer", "close model"]
    assert not host.is_stuck


async def test_a_rank_is_ready_until_it_drains() -> None:
    driver = FakeDriver()
    async with hosted(driver) as (host, registry), aiohttp.ClientSession() as session:
        url = f"http://{registry.records[0].metrics_address}/ready"
        async with session.get(url) as response:
            assert response.status == 200
        host.tell_draining()
        async with session.get(url) as response:
            assert response.status == 503


async def test_a_rank_listens_where_it_is_told() -> None:
    port, metrics_port, calls_port = (free_port(HOST) for _ in range(3))
    options = {
        "listen": Listen(bind=HOST, port=port),
        "metrics_port": metrics_port,
        "calls_port": calls_port,
    }
    async with hosted(FakeDriver(), **options) as (_, registry):
        (record,) = registry.records
        assert record.address == f"{HOST}:{port}"
        assert record.metrics_address == f"{HOST}:{metrics_port}"
        assert record.calls_address == f"{HOST}:{calls_port}"
        with pytest.raises(ConfigError, match=f"--calls-port = {calls_port}"):
            async with hosted(FakeDriver(), calls_port=calls_port):
                pass
        with pytest.raises(ConfigError, match=f"--metrics-port = {metrics_port}"):
            async with hosted(FakeDriver(), metrics_port=metrics_port):
                pass
        with pytest.raises(ConfigError, match=f"--port = {port}"):
            async with hosted(FakeDriver(), listen=Listen(bind=HOST, port=port)):
                pass


async def test_what_ends_the_engine_loop_ends_the_worker() -> None:
    driver = FakeDriver(num_ranks=2)
    async with hosted(driver) as (host, _):
        driver.loop.ended.set_result(PeerLostError("rank 1 is gone"))
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            await asyncio.wait_for(host.main_loop(), 60)
    assert host.is_stuck, "what all ranks close together would wait for the one that is gone"
    assert "close model" not in driver.log


async def test_an_engine_loop_that_does_not_stop_is_left_alone() -> None:
    driver = FakeDriver(num_ranks=2)
    driver.loop.hangs = True
    async with hosted(driver) as (host, _):
        pass
    assert host.is_stuck
    assert driver.log.count("stop") == 1
    assert "close model" not in driver.log


async def test_a_rank_that_is_empty_early_leaves_the_others_their_grace() -> None:
    driver = FakeDriver(num_ranks=2)
    async with hosted(driver) as (host, _):
        await host.drain()
    assert driver.loop.stop_timeout_s > STOP_TIMEOUT_S + host.grace_s / 2


async def test_a_rank_follows_another_of_its_group_that_was_told_to_stop() -> None:
    driver = FakeDriver(num_ranks=2)
    driver.may_drain.clear()
    async with hosted(driver) as (host, _):
        main = asyncio.ensure_future(host.main_loop())
        await asyncio.sleep(0)
        driver.log.clear()
        driver.loop.other_leaves.set_result(None)
        async with asyncio.timeout(60):
            while not driver.log:
                await asyncio.sleep(0.01)
        assert not main.done(), "it has requests"
        driver.may_drain.set()
        await asyncio.wait_for(main, 60)
        assert driver.log == ["refuse", f"drain {DRAIN_SHARE * FOLLOW_GRACE_S:g}"]
    assert not host.is_stuck


async def test_a_rank_whose_drain_is_cut_short_does_not_wait_for_the_others() -> None:
    driver = FakeDriver(num_ranks=2)
    driver.may_drain.clear()
    async with hosted(driver) as (host, _):
        drain = asyncio.ensure_future(host.drain())
        await asyncio.sleep(0)
        drain.cancel()
        await asyncio.wait({drain})
    assert driver.loop.stop_timeout_s == STOP_TIMEOUT_S


async def test_a_renewal_that_ends_ends_the_worker() -> None:
    """No router would send it anything any more, and nothing else would say so."""
    driver = FakeDriver()

    def fail() -> registry_pb2.WorkerLoad:
        raise ZeroDivisionError("no load")

    async with hosted(driver) as (host, _):
        driver.load = fail
        with pytest.raises(InternalError, match="is not renewed any more") as caught:
            await asyncio.wait_for(host.main_loop(), 60)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


async def test_collections_that_held_a_rank_up_are_told_while_it_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.host.SWEEP_INTERVAL_S", 0.01)
    monkeypatch.setattr("runtime.garbage.LONG_PAUSE_S", -1.0)
    before = list(gc.callbacks)
    async with hosted(FakeDriver()) as (host, _):
        main = asyncio.ensure_future(host.main_loop())
        gc.collect()
        async with asyncio.timeout(60):
            while "stood still to collect garbage" not in caplog.text:
                await asyncio.sleep(0.01)
        found = host.registry.get_sample_value("pd_worker_gc_pauses_total")
        assert found is not None
        assert found >= 1
        main.cancel()
    assert gc.callbacks == before
