"""How long the tests of each folder take, beside what they may take.

``tests/seconds.toml`` is the budget: seconds of tests by folder, summed over all processes, as two
cores took them. Every run of more than a minute prints both. Where ``TANDEM_CHECK_SECONDS`` is set,
as in CI, a folder that took more than ``SLACK`` times its budget fails the run: machines differ by
half, and a folder that grew is to be seen before the gate is slow.

A new test of a whole cluster is ``nightly`` unless it replaces one in the gate.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from pathlib import Path

import pytest

BUDGET = Path(__file__).with_name("seconds.toml")
SLACK = 2.0
SHORT_RUN_S = 60.0

BESIDE = {"nightly", "soak", "clients", "gpu"}
"""Marks of tests that the gate leaves out: the budget is not for them."""

_spent: Counter[str] = Counter()


def folder_of(test: str) -> str:
    """The folder below ``tests`` that a node id belongs to; "." for files of ``tests`` itself."""
    parts = test.split("::", 1)[0].split("/")
    return parts[1] if len(parts) > 2 else "."


def rows_of(spent: dict[str, float], budget: dict[str, float]) -> list[tuple[str, float, float]]:
    """(folder, seconds spent, seconds allowed) by folder, the dearest first."""
    folders = sorted(spent, key=lambda folder: -spent[folder])
    return [(folder, spent[folder], budget.get(folder, 0.0)) for folder in folders]


def over_budget(spent: dict[str, float], budget: dict[str, float]) -> list[str]:
    """Folders that took more than ``SLACK`` times their seconds, or have none in the file."""
    return [
        folder
        for folder, seconds, allowed in rows_of(spent, budget)
        if seconds > SLACK * allowed and seconds > 1.0
    ]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up; under xdist the controller hears of every process's tests."""
    if BESIDE.isdisjoint(report.keywords):
        _spent[folder_of(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run whose folders took far more than they may, where that is asked for."""
    if not os.environ.get("TANDEM_CHECK_SECONDS") or hasattr(session.config, "workerinput"):
        return
    if session.exitstatus == pytest.ExitCode.OK and over_budget(_spent, budget()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print seconds by folder, and which folders are over."""
    if sum(_spent.values()) < SHORT_RUN_S:
        return
    allowed = budget()
    terminalreporter.section("seconds by folder (all processes; budget in tests/seconds.toml)")
    for folder, seconds, most in rows_of(_spent, allowed):
        terminalreporter.write_line(f"{folder:14} {seconds:7.0f} of {most:5.0f}")
    for folder in over_budget(_spent, allowed):
        terminalreporter.write_line(
            f"tests/{folder} takes more than {SLACK:g} times its budget: make its tests cheaper, "
            "mark them nightly, or raise tests/seconds.toml and say why"
        )


def budget() -> dict[str, float]:
    """Seconds that each folder may take, from the file."""
    return {
        str(folder): float(seconds)
        for folder, seconds in tomllib.loads(BUDGET.read_text())["seconds"].items()
    }
