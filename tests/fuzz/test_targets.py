"""Every target takes every input that was kept: a crash that was found once is a test for ever."""

from __future__ import annotations

import pytest

from tests.fuzz.target import read_corpus
from tests.fuzz.targets import TARGETS

NAMES = sorted(TARGETS)


@pytest.mark.parametrize("name", NAMES)
def test_a_target_takes_what_was_kept(name: str) -> None:
    target = TARGETS[name]
    assert target.seeds
    for data in (b"", b"\0", *target.seeds, *read_corpus(name)):
        target.try_one(data)
