"""The bar moves on a terminal; elsewhere the log says how far the work is."""

import logging

import pytest

from engine.weights.progress import LINE_S, ProgressLines, Unit, progress_bar, progress_text


def test_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("loading") as move:
        move(1, 2)
        move(2, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip() == ""


def test_drawn_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's way to treat stderr as a terminal
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("loading weights") as move:
        move(512, 1024)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loading weights" in captured.err


def test_the_log_has_a_line_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    lines = ProgressLines("loading weights", Unit.BYTES, lambda: now)
    with caplog.at_level(logging.INFO):
        for done in range(1, 11):
            now += LINE_S / 2
            lines.move(done * 10**9, 10 * 10**9)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 4  # every second one, and none for the end
    assert texts[0] == "loading weights 20% (2.0 of 10.0 GB, 0.67 GB/s, 12 s left)"


def test_progress_says_share_amount_speed_and_time_left() -> None:
    text = progress_text(80_500_000_000, 671_000_000_000, 35.0, Unit.BYTES)
    assert text == "11% (80.5 of 671.0 GB, 2.30 GB/s, 4 min 16 s left)"
    assert progress_text(5, 50, 2.0, Unit.CALLS) == "10% (5 of 50, 18 s left)"
    assert progress_text(1, 1000, 0.0, Unit.BYTES) == "0% (0.0 of 0.0 MB, -, 0 s left)"
