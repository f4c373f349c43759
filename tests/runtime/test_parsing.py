"""Whatever is wrong with JSON or TOML from outside is a ValueError."""

from __future__ import annotations

import pytest

from runtime.parsing import parse_json, parse_toml

DEEP = 100_000


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * DEEP, '{"a":' * DEEP, "1" * 5000, b"\xff", '"\\u12"'],
    ids=lambda text: repr(text)[:20],
)
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    ["a", f"a = {'[' * DEEP}", f"a = {'{b = ' * DEEP}", f"a = {'1' * 5000}"],
    ids=lambda text: repr(text)[:20],
)
def test_what_is_no_toml_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_toml(text)


def test_what_is_one_is_read() -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]}
    assert parse_toml("a = [1]") == {"a": [1]}
