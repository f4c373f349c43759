"""Sums over processes can be read at any moment of another process's start."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from router.metrics.shared import SharedMetrics

COUNT = """
from prometheus_client import Counter, CollectorRegistry
Counter("answers", "so many", registry=CollectorRegistry()).inc(3)
"""


def count_in_another_process(folder: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", COUNT], env=environment, check=True, timeout=120)


def read(folder: Path) -> str:
    registry = CollectorRegistry()
    registry.register(SharedMetrics(str(folder)))
    return generate_latest(registry).decode()


def test_a_file_without_its_size_yet_is_no_failure(tmp_path: Path) -> None:
    count_in_another_process(tmp_path)
    (tmp_path / "counter_999.db").touch()
    assert "answers_total 3.0" in read(tmp_path)


def test_processes_add_up(tmp_path: Path) -> None:
    assert read(tmp_path).strip() == ""
    count_in_another_process(tmp_path)
    count_in_another_process(tmp_path)
    assert "answers_total 6.0" in read(tmp_path)
