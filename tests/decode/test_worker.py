"""The ways out of a boot: what waits for others is left alone, and nobody waits for it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from decode.assembly import ModelSide
from decode.worker import DecodeDriver
from deploy.ports import free_port
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.parallel.lockstep import SoloLockstep
from engine.streams import Streams
from runtime.config import ClusterConfig, DecodeSection, ModelSection
from runtime.config.file import dump_config
from runtime.errors import ConfigError, PeerLostError
from tests.decode.cluster import EPOCH, HOST, make_options
from tests.decode.imagined import VOCAB_SIZE, ContextRunner, make_pool
from tests.decode.test_group import start_rank
from tests.engine.tiny import tiny_config, write_checkpoint
from worker.arguments import WorkerOptions
from worker.host import WorkerHost


class LostGroup(RankGroup):
    """Its other rank dies while it boots."""

    def barrier(self) -> None:
        raise PeerLostError("another rank was lost in barrier")


def side_of(num_ranks: int, boot_group: RankGroup, close: Callable[[], None]) -> ModelSide:
    pool = make_pool(8)
    dims = ParallelDims(dp=num_ranks, ep=num_ranks)
    return ModelSide(
        close_steps=close,
        groups=ProcessGroups(dims=dims, boot_group=boot_group),
        close_transfers=close,
        epoch=EPOCH,
        lockstep=SoloLockstep(),
        vocab_size=VOCAB_SIZE,
        max_model_len=100,
        kv_pool=pool,
        runner=ContextRunner(pool),  # type: ignore[arg-type]
        streams=Streams(pool.device),
    )


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def host_of(build: Callable[[WorkerOptions], ModelSide]) -> WorkerHost:
    options = make_options("127.0.0.1:1")
    return WorkerHost(options, DecodeDriver(options, build))


async def test_a_boot_that_fails_is_left_to_the_end_of_the_process() -> None:
    def build(_: object) -> ModelSide:
        raise ConfigError("decode.cuda_graphs", "on", "cannot be captured", '"off"')

    worker = host_of(build)
    with pytest.raises(ConfigError):
        await worker.startup()
    await worker.shutdown()
    assert worker.is_stuck


async def test_a_rank_that_loses_another_after_capture_does_not_leave_in_order() -> None:
    closed: list[int] = []
    side = side_of(2, LostGroup(size=2), lambda: closed.append(1))
    worker = host_of(lambda _: side)
    with pytest.raises(PeerLostError):
        await worker.startup()
    await worker.shutdown()
    assert worker.is_stuck
    assert not closed, "what all ranks close together would wait for the one that is gone"


def test_whoever_is_told_to_stop_while_he_boots_waits_for_nobody() -> None:
    release = threading.Event()

    def build(_: object) -> ModelSide:
        release.wait(60)
        raise ConfigError("model.path", "", "too late", "come earlier")

    async def boot() -> WorkerHost:
        worker = host_of(build)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await worker.startup()
        await worker.shutdown()
        return worker

    began = time.monotonic()
    assert asyncio.run(boot()).is_stuck
    assert time.monotonic() - began < 30  # and not when the boot is over
    release.set()


@pytest.mark.slow
def test_a_rank_that_waits_for_another_takes_sigterm(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", tiny_config(), seed=3)
    config = ClusterConfig(
        model=ModelSection(path=str(tmp_path / "model")), decode=DecodeSection(dp=2, num_blocks=64)
    )
    (tmp_path / "cluster.toml").write_text(dump_config(config))
    port = free_port(HOST)
    process = start_rank(0, f"{HOST}:{port}", f"{HOST}:1", tmp_path)
    try:
        deadline = time.monotonic() + 180
        while not listens(port):  # then it waits for rank 1
            assert process.poll() is None, (tmp_path / "rank-0.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) >= 0, "by itself, and not by the signal"
    finally:
        process.kill()
        process.wait(60)
