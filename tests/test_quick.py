"""Which tests a change asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import quick

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("router/http/wire/sse.py", "tests/router/http"),
        ("router/service.py", "tests/router"),
        ("decode/loop.py", "tests/decode"),
        ("kv_transfer/transports/nixl.py", "tests/kv_transfer"),
        ("tests/decode/test_loop.py", "tests/decode/test_loop.py"),
        ("tests/decode/helpers.py", "tests/decode"),
        ("proto/decode.proto", "tests/prefill"),
        ("README.md", "tests/test_documents.py"),
    ],
)
def test_a_file_asks_for_the_tests_of_its_folder(path: str, test: str) -> None:
    assert test in quick.tests_of([path])


def test_what_a_wanted_folder_holds_is_not_named_again() -> None:
    tests = quick.tests_of(
        ["router/service.py", "router/http/wire/sse.py", "tests/router/fakes.py"]
    )
    assert "tests/router" in tests
    assert not any(test.startswith("tests/router/") for test in tests)


def test_budgets_and_documents_are_always_checked() -> None:
    assert {"tests/test_budgets.py", "tests/test_documents.py"} <= set(quick.tests_of([]))
