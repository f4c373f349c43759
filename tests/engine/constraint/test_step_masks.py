"""Masks that take long share the time of a step, and none waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.constraint import step_masks
from engine.constraint.matcher import Matcher
from engine.constraint.step_masks import BUDGET_S, GROUP, QUICK_S, _fill_measured, _groups, _in_turn
from runtime.sampling import OutputConstraint


def matcher_of(mask_s: float = 0.0, *, filled_at: float = 0.0, is_alone: bool = False) -> Matcher:
    made = Matcher(OutputConstraint(starts_after=(1,)), None, stop_token_ids=(), vocab_size=32)
    made.mask_s, made.filled_at, made.is_alone = mask_s, filled_at, is_alone
    return made


def sequences(costs: list[float]) -> list[step_masks._Sequence]:
    return [step_masks._Sequence(n, matcher_of(cost)) for n, cost in enumerate(costs)]


COSTS = st.lists(st.sampled_from([0.0, QUICK_S, 2 * QUICK_S, BUDGET_S / 2, 3 * BUDGET_S]))


@given(COSTS, st.integers(1, 4))
def test_quick_ones_are_always_made_and_others_within_the_budget(
    costs: list[float], num_masks: int
) -> None:
    going = sequences(costs)
    taken, left = _in_turn(going, num_masks)
    assert sorted([*taken, *left]) == going
    assert all(one.matcher.mask_s > QUICK_S for one in left)
    slow = [one.matcher.mask_s * num_masks for one in taken if one.matcher.mask_s > QUICK_S]
    assert bool(slow) == any(cost > QUICK_S for cost in costs)
    assert len(slow) <= 1 or sum(slow) <= BUDGET_S + 1e-9


@given(COSTS, st.integers(1, 4))
def test_each_has_its_turn(costs: list[float], num_masks: int) -> None:
    going, seen = sequences(costs), set[int]()
    for step in range(len(costs)):
        taken, _ = _in_turn(going, num_masks)
        for one in taken:
            one.matcher.filled_at = step + 1.0
            seen.add(one.place)
    assert seen == set(range(len(costs)))


@given(st.lists(st.booleans(), max_size=4 * GROUP))
def test_groups_have_every_row_once_and_none_that_is_alone(alone: list[bool]) -> None:
    matchers = [matcher_of(is_alone=each) for each in alone]
    groups = list(_groups(matchers))
    assert [place for first, end in groups for place in range(first, end)] == [
        *range(len(matchers))
    ]
    for first, end in groups:
        assert end - first == 1 or not any(alone[first:end])
        assert end - first <= GROUP


def test_what_slows_a_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    now, hog, quick = 0.0, matcher_of(), [matcher_of() for _ in range(3)]

    def fill(group: list[Matcher], words: np.ndarray) -> None:
        nonlocal now
        now += 1e-5 * len(group) + (1.0 if hog in group else 0.0)

    monkeypatch.setattr(step_masks, "fill_masks", fill)
    monkeypatch.setattr(step_masks.time, "perf_counter", lambda: now)
    words = np.zeros((4, 1), dtype=np.int32)
    _fill_measured([*quick, hog], words)
    assert [one.mask_s for one in (*quick, hog)] == [0.0] * 4  # whose it was is not known
    _fill_measured([*quick, hog], words)
    assert all(one.mask_s < QUICK_S and not one.is_alone for one in quick)
    assert hog.mask_s > 1.0
    assert hog.is_alone
