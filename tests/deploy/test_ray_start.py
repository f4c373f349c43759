"""The start of a Ray of our own, with a module that stands for Ray: tries, causes, what is left."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import ClusterError
from deploy.ray.connection import open_ray
from deploy.ray.settings import RaySettings
from deploy.ray.start import start_own_ray
from deploy.running.sweep import ray_folder, ray_temp_dir

LATE = "The current node timed out during startup. This could happen because ..."


class SlowRay:
    """Raises ``errors`` one after another, then starts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_shut_down = 0
        self.modes: list[int] = []

    def init(self, **arguments: Any) -> None:
        folder = Path(arguments["_temp_dir"])
        folder.chmod(0o777)
        self.modes.append(stat.S_IMODE(folder.parent.stat().st_mode))
        logs = folder / "session_1" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.out").write_text("said by raylet")
        if self.errors:
            raise self.errors.pop(0)

    def shutdown(self) -> None:
        self.num_shut_down += 1


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[RaySettings]:
    run_id = secrets.token_hex(8)
    yield RaySettings(run_id=run_id, token="s", start_timeout_s=60, log_dir=str(tmp_path))
    shutil.rmtree(ray_folder(run_id), ignore_errors=True)


def test_a_slow_start_is_tried_again_in_a_folder_that_is_ours_alone(settings: RaySettings) -> None:
    ray, told = SlowRay(Exception(LATE), RuntimeError("Timed out waiting for file")), []
    start_own_ray(ray, settings, told.append)
    assert ray.modes == [0o700] * 3
    assert ray.num_shut_down == 2
    assert told == [f"waits for Ray, which did not start in 0 s: try {n}" for n in (2, 3)]
    assert ray_temp_dir(settings.run_id).is_dir()


def test_what_never_starts_is_one_line_with_cause_logs_and_fix(
    settings: RaySettings, tmp_path: Path
) -> None:
    hasty = RaySettings(run_id=settings.run_id, token="s", start_timeout_s=0, log_dir=str(tmp_path))
    with pytest.raises(ClusterError) as caught:
        start_own_ray(SlowRay(*[Exception(LATE)] * 2), hasty, print)
    said = str(caught.value)
    assert said.startswith("Ray has not started on this machine within 0 s; its logs are in ")
    assert "Fix: " in said
    assert "\n" not in said
    assert (tmp_path / "ray" / "raylet.out").read_text() == "said by raylet"
    assert not ray_temp_dir(settings.run_id).exists()


def test_what_no_patience_mends_is_told_at_once(settings: RaySettings) -> None:
    ray = SlowRay(OSError("No space left on device"), Exception(LATE))
    with pytest.raises(ClusterError, match=r"No space left on device; its logs are in .* Fix: "):
        start_own_ray(ray, settings, print)
    assert len(ray.errors) == 1


def test_ray_lowers_no_server_and_speaks_into_the_controllers_log(
    settings: RaySettings,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SlowRay())
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = logging.getLogger("ray")
    monkeypatch.setattr(words, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(words, "propagate", False)
    open_ray(settings)
    assert os.environ.get("RAY_worker_niceness") == "0"  # noqa: SIM112
    words.getChild("node").error("twenty lines")
    assert "twenty lines" in caplog.text
    assert "twenty lines" not in capfd.readouterr().err
