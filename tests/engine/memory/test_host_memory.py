"""The less of host and container is free."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.memory.host_memory import free_bytes

AVAILABLE = 1000


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type("Memory", (), {"available": AVAILABLE})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max\n", "5\n", AVAILABLE), ("900\n", "200\n", 700), ("9000\n", "5\n", AVAILABLE)],
)
def test_a_limit_counts_where_it_is_less(tmp_path: Path, limit: str, used: str, free: int) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    assert free_bytes(tmp_path) == free


def test_a_container_that_is_over_its_limit_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("100")
    (tmp_path / "memory.current").write_text("120")
    assert free_bytes(tmp_path) == 0


def test_without_control_files_the_host_counts(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) == AVAILABLE
