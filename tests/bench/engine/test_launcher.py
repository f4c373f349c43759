"""Ranks are started, found by torchrun's variables, and end together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.engine.launcher import Job, RankPlace, launch
from deploy.errors import ClusterError
from runtime.errors import ConfigError, PeerLostError


def sum_of_ranks(factor: int, place: RankPlace) -> int | None:
    return factor * place.world_size if place.rank == 0 else None


def fail_on_the_last(seconds: float, place: RankPlace) -> int | None:
    if place.rank == place.world_size - 1:
        raise PeerLostError("rank 0 was lost")
    time.sleep(seconds)
    return None


def die(_: int, place: RankPlace) -> int | None:
    if place.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return None


@pytest.mark.slow
def test_rank_0_gives_the_result() -> None:
    assert launch(Job(run=sum_of_ranks, options=5, world_size=2, device="cpu")) == 10
    assert launch(Job(run=sum_of_ranks, options=5, world_size=1, device="cpu")) == 5


@pytest.mark.slow
def test_one_failure_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(ClusterError, match="rank 1 ended with status 1"):
        launch(Job(run=fail_on_the_last, options=60.0, world_size=2, device="cpu"))
    assert time.monotonic() - began < 30
    assert "error: rank 1: rank 0 was lost" in capfd.readouterr().err


@pytest.mark.slow
def test_a_killed_rank_is_told() -> None:
    with pytest.raises(ClusterError, match="rank 0 ended with status -9"):
        launch(Job(run=die, options=0, world_size=2, device="cpu"))


def test_under_torchrun_this_process_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_RANK", 1), ("MASTER_PORT", 9)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "host")
    assert launch(Job(run=sum_of_ranks, options=5, world_size=2, device="cpu")) is None
    with pytest.raises(ConfigError, match="torchrun has started 2"):
        launch(Job(run=sum_of_ranks, options=5, world_size=4, device="cpu"))


def test_more_ranks_than_devices() -> None:
    with pytest.raises(ConfigError, match=r"tp x dp = 99.*--device cpu"):
        launch(Job(run=sum_of_ranks, options=5, world_size=99, device="cuda"))


def test_the_command_line_needs_neither_ray_nor_torch() -> None:
    code = (
        "import sys, deploy.cli; deploy.cli.build_parser();"
        " sys.exit(any(name in sys.modules for name in ('ray', 'torch', 'numpy', 'aiohttp')))"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)


@pytest.mark.parametrize(
    ("found", "fix"), [(0, "a machine with GPUs (`tandem doctor` "), (3, "at most 3, or --device")]
)
def test_too_few_devices_are_refused_with_what_can_be_done(
    found: int, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    with pytest.raises(ConfigError) as caught:
        launch(Job(run=sum_of_ranks, options=5, world_size=4, device="cuda"))
    assert caught.value.fix.startswith(fix)
    assert caught.value.fix.endswith("or --device cpu")
