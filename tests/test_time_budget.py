"""What a folder's tests may take, and what is said where they take more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import time_budget

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("test", "folder"),
    [
        ("tests/router/http/test_app.py::test_it", "router"),
        ("tests/engine/ops/test_norm.py::test_it[a/b]", "engine"),
        ("tests/test_quick.py::test_it", "."),
    ],
)
def test_a_test_belongs_to_the_folder_below_tests(test: str, folder: str) -> None:
    assert time_budget.folder_of(test) == folder


def test_a_folder_is_over_beyond_the_slack_and_without_a_budget() -> None:
    spent = {"a": 9.0, "b": 21.0, "new": 5.0, "tiny": 0.5}
    assert time_budget.over_budget(spent, {"a": 5.0, "b": 10.0}) == ["b", "new"]


def test_every_folder_of_tests_has_a_budget() -> None:
    folders = {folder.name for folder in TESTS.iterdir() if any(folder.rglob("test_*.py"))}
    assert folders == time_budget.budget().keys() - {"."}


@pytest.mark.parametrize(("marks", "seconds"), [({}, 2.0), ({"nightly": 1}, 0.0)])
def test_only_tests_of_the_gate_are_counted(
    monkeypatch: pytest.MonkeyPatch, marks: dict[str, int], seconds: float
) -> None:
    spent: Counter[str] = Counter()
    monkeypatch.setattr(time_budget, "_spent", spent)
    report = pytest.TestReport(
        "tests/a/test_b.py::c", ("", 0, ""), marks, "passed", None, "call", duration=2.0
    )
    time_budget.pytest_runtest_logreport(report)
    assert spent["a"] == seconds
