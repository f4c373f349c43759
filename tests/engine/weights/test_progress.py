"""The bar moves on a terminal and stays silent elsewhere."""

import pytest

from engine.weights.progress import progress_bar


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
