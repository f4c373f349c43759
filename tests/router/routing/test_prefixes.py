"""What is remembered of prompts that were sent: as long as any of them is on its way."""

from __future__ import annotations

import pytest

from router.pool.members import WorkerKey
from router.routing import prefixes
from router.routing.prefixes import EXPECTED_S, Prefixes
from tests.router.routing.pools import Clock

KEY = WorkerKey("prefill-0", 1, 0)
HASHES = [bytes([n]) * 16 for n in range(8)]


def made() -> tuple[Prefixes, Clock]:
    clock = Clock()
    remembered = Prefixes(clock)
    remembered.index.add(KEY)
    return remembered, clock


def expected(remembered: Prefixes) -> int:
    remembered.expire()
    return remembered.index.match(HASHES).num_blocks(KEY)


def test_a_block_of_two_prompts_is_expected_until_both_should_be_there() -> None:
    remembered, clock = made()
    remembered.expect(KEY, HASHES[:4], 1.0)
    clock.now += 1.0
    remembered.expect(KEY, HASHES[:6], 1.0)
    assert expected(remembered) == 6
    clock.now += EXPECTED_S  # the first one's time is over
    assert expected(remembered) == 6
    clock.now += 1.0
    assert expected(remembered) == 0


def test_what_ends_after_its_rank_came_back_says_nothing_of_the_later_life() -> None:
    remembered, clock = made()
    remembered.expect(KEY, HASHES[:4], 0.0)
    remembered.index.remove(KEY)
    remembered.index.add(KEY)
    assert expected(remembered) == 0
    clock.now += 1.0
    remembered.expect(KEY, HASHES[:3], 0.0)
    clock.now += EXPECTED_S - 0.5
    assert expected(remembered) == 3


def test_a_pick_after_a_pause_takes_back_no_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefixes, "EXPIRED_AT_ONCE", 4)
    remembered, clock = made()
    for start in range(0, 8, 2):
        remembered.expect(KEY, HASHES[start : start + 2], 0.0)
    clock.now += 100.0
    left = []
    for _ in range(3):
        remembered.expire()
        left.append(len(remembered.index._expected))
    assert left == [4, 0, 0]
