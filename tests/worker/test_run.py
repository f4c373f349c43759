"""How a worker process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.__main__ import make_service as decode_service
from prefill.__main__ import FOLLOWER_EXTRA_GRACE_S
from prefill.__main__ import make_service as prefill_service
from runtime.config.file import SECRET_VARIABLE
from runtime.errors import PeerLostError
from tests.worker.test_arguments import CONFIG, arguments
from worker.host import WorkerHost
from worker.run import run_worker


class Unclosable:
    """A service that fails, and cannot be closed either."""

    grace_s = 1.0

    def __init__(self, *, is_stuck: bool) -> None:
        self.is_stuck = is_stuck

    async def startup(self) -> None:
        """Nothing to do."""

    async def main_loop(self) -> None:
        raise PeerLostError("another rank was lost")

    async def drain(self) -> None:
        raise AssertionError("it has failed")

    async def shutdown(self) -> None:
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_rank_that_cannot_even_be_closed_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "s")
    for name in ("configure_logging", "limit_threads"):
        monkeypatch.setattr(f"worker.run.{name}", lambda *_: None)
    monkeypatch.setattr("worker.run.logging.shutdown", lambda: None)
    forced: list[int] = []
    monkeypatch.setattr("worker.run.os._exit", forced.append)
    service = Unclosable(is_stuck=is_stuck)
    status = run_worker("decode", arguments(tmp_path), lambda _: service)
    assert status == 1
    assert forced == ([1] if is_stuck else []), "without destructors where they may hang"


def test_a_rank_drains_for_as_long_as_its_command_line_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "s")
    for name in ("configure_logging", "limit_threads"):
        monkeypatch.setattr(f"worker.run.{name}", lambda *_: None)
    graces: list[float] = []

    def run(service: WorkerHost, *, grace_s: float) -> int:
        graces.append(grace_s)
        return 0

    monkeypatch.setattr("worker.run.run_service", run)
    for grace in ("2.5", "0"):
        given = arguments(tmp_path, grace=grace)
        assert run_worker("decode", given, decode_service) == 0
    # Rank 1 follows rank 0, which drains first.
    given = arguments(tmp_path, CONFIG + "[prefill]\ntp = 2\n", grace="2.5", instance="prefill-0")
    assert run_worker("prefill", given, prefill_service) == 0
    assert graces == [2.5, 0.0, 2.5 + FOLLOWER_EXTRA_GRACE_S]
