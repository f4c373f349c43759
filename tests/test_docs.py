"""The documentation names tests: each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reliability.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def _functions(file: Path) -> set[str]:
    module = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(module) if isinstance(node, kinds)}


def test_every_test_that_the_table_of_failures_names_exists() -> None:
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 60
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (TESTS / file).is_file() or name not in _functions(TESTS / file)
    ]
    assert missing == []


def test_every_case_has_a_row_and_says_what_happens() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+)[a-z]? \| (.+?) \| (.+?) \|(.*)\|$", text, re.MULTILINE)
    assert {int(number) for number, *_ in rows} == set(range(1, 31))
    for number, _, answer, tests in rows:
        assert "::" in tests or "not applicable" in answer, number
