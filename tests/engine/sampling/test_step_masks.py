"""Masks that take long share the time of a step, and none waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import step_masks
from engine.sampling.step_masks import (
    BUDGET_S,
    GROUP,
    MOST_HIDDEN_S,
    QUICK_S,
    _fill_measured,
    _groups,
    _in_turn,
)
from grammar.matcher import Matcher
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


KINDS = st.lists(st.sampled_from([(0.0, False), (2 * QUICK_S, False), (2 * QUICK_S, True)]))


@given(KINDS)
def test_groups_have_every_row_once_and_are_of_one_kind(kinds: list[tuple[float, bool]]) -> None:
    matchers = [matcher_of(mask_s, is_alone=is_alone) for mask_s, is_alone in kinds]
    groups = list(_groups(matchers))
    assert [one for group in groups for one in group] == matchers
    for group in groups:
        assert len({(one.mask_s, one.is_alone) for one in group}) == 1
        assert len(group) <= (1 if group[0].is_alone else GROUP)


def test_what_slows_a_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    now, hogs, quick = 0.0, [matcher_of() for _ in range(2)], [matcher_of() for _ in range(3)]

    def fill(group: list[Matcher], words: np.ndarray) -> None:
        nonlocal now
        assert len(words) == len(group)
        now += 1e-5 * len(group) + sum(one in hogs for one in group)

    monkeypatch.setattr(step_masks, "fill_masks", fill)
    monkeypatch.setattr(step_masks.time, "perf_counter", lambda: now)
    words = np.zeros((5, 1), dtype=np.int32)
    _fill_measured([*quick, *hogs], words)
    assert {(one.mask_s, one.is_alone) for one in (*quick, *hogs)} == {(MOST_HIDDEN_S, True)}
    for _ in range(2):  # alone, and then together again
        _fill_measured([*quick, *hogs], words)
        assert all(one.mask_s < QUICK_S and not one.is_alone for one in quick)
        assert all(one.mask_s > 1.0 and not one.is_alone for one in hogs)
