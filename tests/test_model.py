"""The model of the hand-over, searched by spin where it is installed."""

from __future__ import annotations

import shutil

import pytest

from scripts.model import configurations, is_as_expected, read_search, search

END = "State-vector 220 byte, depth reached 95, errors: {}\n    47915 states, stored\n"
HOLDS, SEEDED = configurations()[0], next(one for one in configurations() if one.seed)


@pytest.mark.parametrize(
    ("configuration", "text", "expected"),
    [
        (HOLDS, END.format(0), True),
        (HOLDS, END.format(1), False),
        (HOLDS, "Warning: Search not completed\n" + END.format(0), False),
        (HOLDS, "error: max search depth too small\n" + END.format(0), False),
        (SEEDED, END.format(1), True),
        (SEEDED, END.format(0), False),
    ],
)
def test_only_a_whole_search_shows_that_something_holds(configuration, text, expected) -> None:
    found = read_search(text)
    assert found.num_states == 47915
    assert is_as_expected(configuration, found) is expected


@pytest.mark.nightly
@pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="no spin, no gcc")
@pytest.mark.parametrize("name", ["cuts", "CANCELS_ARE_FINAL", "REUSE_NONCE"])
def test_spin_finds_what_it_must(name: str) -> None:
    (configuration,) = (one for one in configurations() if one.name == name)
    found = search(configuration)
    assert is_as_expected(configuration, found), found.text
