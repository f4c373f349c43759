"""What is said of a download."""

from __future__ import annotations

import threading

import pytest

from deploy.checkpoint import download_display
from deploy.checkpoint.download_display import describe_progress, shown

GB = 10**9


@pytest.mark.parametrize(
    ("total", "before", "done", "seconds", "text"),
    [
        (700 * GB, 0, 70 * GB, 100.0, "70 GB of 700 GB (10 %), 700 MB/s, 15 min left"),
        (700 * GB, 600 * GB, 650 * GB, 100.0, "650 GB of 700 GB (93 %), 500 MB/s, 2 min left"),
        (700 * GB, 0, GB, 100.0, "1 GB of 700 GB (0 %), 10 MB/s, 19.4 h left"),
        (1000, 0, 500, 10.0, "500 B of 1 kB (50 %), 50 B/s, 10 s left"),
        (1000, 500, 500, 10.0, "500 B of 1 kB (50 %), nothing comes"),
        (0, 0, 0, 0.0, "0 B of 0 B (100 %), nothing comes"),
    ],
)
def test_bytes_rate_and_time_left(
    total: int, before: int, done: int, seconds: float, text: str
) -> None:
    assert describe_progress(total, before, done, seconds) == text


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(download_display, "LINE_S", 0.001)
    looked = threading.Event()
    done = iter(range(0, 10**9, 100))

    def measure() -> int:
        number = next(done)
        if number >= 300:
            looked.set()
        return number

    with shown("downloading a/b", 1000, measure):
        assert looked.wait(60)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "downloading a/b: 1 kB, 0 B of it are here"
    assert lines[1].startswith("downloading a/b: 100 B of 1 kB (10 %), ")
    assert lines[1].endswith(" left")
