"""How a worker process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config_file import SECRET_VARIABLE
from runtime.errors import PeerLostError
from tests.runtime.test_worker import arguments
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
