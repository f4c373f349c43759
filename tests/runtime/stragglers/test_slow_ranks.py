"""What slows ranks down is found within 100 steps, with its class; and nothing where nothing is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.ranks.detection import CASES, Case, places_of
from bench.ranks.played import Fault, Timing, play
from runtime.stragglers.rank_picture import words_of
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, Phase, RankBlock, WaitWindow, window_of
from runtime.stragglers.slow_ranks import SlowKind, find_slow, worst

LONG_GAP = Timing(gap_s=2e-3)


@pytest.mark.parametrize("num_ranks", [4, 8, 16, 72])
@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_a_fault_is_found_with_its_class_and_nothing_beside_it(case: Case, num_ranks: int) -> None:
    num_windows = 12 if num_ranks <= 8 else 2
    for window in play(num_windows, num_ranks, case.fault, seed=num_ranks):
        assert places_of(find_slow(window)) == case.expected


@pytest.mark.parametrize(("num_ranks", "num_windows"), [(2, 500), (4, 500), (8, 300), (72, 4)])
def test_ranks_that_only_vary_give_no_alarm(num_ranks: int, num_windows: int) -> None:
    for window in play(num_windows, num_ranks, seed=11):
        assert worst(find_slow(window)) is None


@given(
    rank=st.integers(0, 3),
    factor=st.floats(1.05, 2.0),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_any_slower_sender_is_found(rank: int, factor: float, seed: int) -> None:
    (window,) = play(1, 4, Fault(ranks=(rank,), attention=factor), seed=seed)
    (finding,) = [found for found in find_slow(window) if found.kind is SlowKind.SENDER]
    assert finding.rank == rank
    assert finding.ratio == pytest.approx(factor, abs=0.02)


@given(receiver=st.integers(0, 7), back=st.integers(1, 7), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_any_slow_link_is_found_from_its_source(receiver: int, back: int, seed: int) -> None:
    source = (receiver + back) % 8
    (window,) = play(1, 8, Fault(ranks=(receiver,), source=source, link_s=8e-6), seed=seed)
    found = places_of(find_slow(window))
    assert found == {(SlowKind.LINK, receiver, source)}


@pytest.mark.parametrize("jitter", [0.0, 0.05, 0.1, 0.2, 0.3])
def test_noise_of_any_size_makes_its_own_threshold(jitter: float) -> None:
    timing = Timing(jitter=jitter, rank_spread=0.0, rows_spread=0.0)
    for window in play(100, 4, seed=7, timing=timing):
        assert worst(find_slow(window)) is None


def test_two_ranks_that_vary_much_raise_an_alarm_in_few_windows() -> None:
    timing = Timing(jitter=0.3, rank_spread=0.0, rows_spread=0.0)
    alarms = [worst(find_slow(window)) for window in play(300, 2, seed=7, timing=timing)]
    assert sum(alarm is not None for alarm in alarms) <= 3


def test_the_scale_of_time_does_not_matter() -> None:
    (window,) = play(1, 4, Fault(ranks=(1,), attention=1.05), seed=3)
    slower = replace(
        window,
        waits_s=window.waits_s * 1000,
        first_waits_s=window.first_waits_s * 1000,
        own_s=window.own_s * 1000,
        own_mean_s=window.own_mean_s * 1000,
    )
    first, second = find_slow(window), find_slow(slower)
    assert places_of(first) == places_of(second)
    assert [found.ratio for found in first] == pytest.approx([found.ratio for found in second])


@given(order=st.permutations(range(4)), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_the_numbers_of_ranks_do_not_matter(order: list[int], seed: int) -> None:
    (window,) = play(1, 4, Fault(ranks=(0,), attention=1.1), seed=seed)
    shuffled = WaitWindow(
        waits_s=window.waits_s[:, :, order][:, :, :, order],
        first_waits_s=window.first_waits_s[:, :, order][:, :, :, order],
        own_s=window.own_s[:, :, order],
        own_mean_s=window.own_mean_s[:, :, order],
        num_rows=window.num_rows[:, order],
        num_tokens=window.num_tokens[:, order],
        num_context_tokens=window.num_context_tokens[:, order],
    )
    expected = {(kind, order.index(rank), source) for kind, rank, source in _places(window)}
    assert _places(shuffled) == expected


def _places(window: WaitWindow) -> set[tuple[SlowKind, int, int]]:
    return set(places_of(find_slow(window)))


def test_of_two_ranks_the_slower_is_found_and_no_link_is_blamed() -> None:
    fault = Fault(ranks=(1,), attention=1.05)
    for window in play(50, 2, fault, seed=5):
        assert places_of(find_slow(window)) == {(SlowKind.SENDER, 1, -1)}


def test_work_that_nobody_waits_for_is_no_finding() -> None:
    (window,) = play(1, 4, seed=5)
    own = window.own_s.copy()
    own[:, Phase.DISPATCH, 2] *= 1.2  # and no wait says so
    assert find_slow(replace(window, own_s=own, own_mean_s=own)) == []


def test_more_tokens_explain_a_longer_step_and_raise_no_alarm() -> None:
    (window,) = play(1, 4, Fault(ranks=(1,), attention=1.2), seed=5)
    tokens = window.num_tokens.copy()
    tokens[:, 1] *= 1.2
    (finding,) = find_slow(replace(window, num_tokens=tokens))
    assert finding.kind is SlowKind.LOAD
    assert not finding.kind.is_fault


def test_two_causes_of_two_ranks_are_both_there_the_worse_first() -> None:
    fault = Fault(ranks=(1,), attention=1.3)
    (slow,) = play(1, 8, fault, seed=5)
    (late,) = play(1, 8, Fault(ranks=(6,), gap_s=4e-3), seed=5)
    both = replace(
        slow,
        waits_s=np.maximum(slow.waits_s, late.waits_s),
        first_waits_s=np.maximum(slow.first_waits_s, late.first_waits_s),
        own_s=np.maximum(slow.own_s, late.own_s),
        own_mean_s=np.maximum(slow.own_mean_s, late.own_mean_s),
    )
    found = find_slow(both)
    assert [(f.kind, f.rank) for f in found] == [(SlowKind.HOST, 6), (SlowKind.SENDER, 1)]
    assert found[0].share > found[1].share > 0.0


def test_a_single_pause_is_no_slow_host() -> None:
    fault = Fault(ranks=(0,), pause_s=0.1, pause_every=60)  # in two blocks of five
    for window in play(20, 4, fault, seed=7):
        assert worst(find_slow(window)) is None


def test_one_rank_alone_has_nobody_to_wait_for() -> None:
    (window,) = play(1, 2, seed=1)
    alone = replace(
        window,
        waits_s=window.waits_s[:, :, :1, :1],
        first_waits_s=window.first_waits_s[:, :, :1, :1],
        own_s=window.own_s[:, :, :1],
        own_mean_s=window.own_mean_s[:, :, :1],
    )
    with pytest.raises(ValueError, match="2 ranks"):
        find_slow(alone)


def block(number: int, *, num_ranks: int = 2, own: float = 1.0) -> RankBlock:
    return RankBlock(
        number=number,
        waits_s=[[0.5] * num_ranks] * len(Phase),
        own_s=[own] * len(Phase),
        own_mean_s=[own] * len(Phase),
        num_rows=10.0,
        num_tokens=4.0,
    )


def test_a_window_is_of_the_newest_blocks_that_all_ranks_have_told() -> None:
    told = {0: [block(n, own=n) for n in range(9)], 1: [block(n, own=n) for n in range(2, 8)]}
    window = window_of(told, 2)
    assert window is not None
    assert window.own_s[:, 0, 0].tolist() == window.own_s[:, 0, 1].tolist() == [3, 4, 5, 6, 7]
    assert window.waits_s.shape == (BLOCKS_OF_WINDOW, len(Phase), 2, 2)
    assert window.step_s > 0


def test_there_is_no_window_before_all_ranks_have_told_enough() -> None:
    blocks = [block(n) for n in range(BLOCKS_OF_WINDOW)]
    assert window_of({0: blocks, 1: blocks[1:]}, 2) is None
    assert window_of({0: blocks}, 2) is None
    assert window_of({0: blocks, 1: blocks}, 2) is not None


def test_blocks_of_another_number_of_ranks_do_not_count() -> None:
    blocks = [block(n, num_ranks=3) for n in range(BLOCKS_OF_WINDOW)]
    assert window_of({0: blocks, 1: blocks}, 2) is None


def test_a_window_tells_waits_as_shares_of_a_step() -> None:
    (window,) = play(1, 4, Fault(ranks=(2,), gap_s=1e-3), seed=1)
    shares = window.wait_shares()
    assert shares.shape == (4, 4)
    assert shares[[0, 1, 3], 2].min() > shares[:, [0, 1, 3]].max()
    assert shares.min() >= 0.0
    assert shares.max() < 1.0


@pytest.mark.parametrize("receiver", [0, 3])
def test_a_link_that_carries_slowly_is_told_from_its_first_bytes(receiver: int) -> None:
    fault = Fault(ranks=(receiver,), source=2, carry_s=6e-6)
    for window in play(10, 4, fault, seed=5):
        (finding,) = find_slow(window)
        assert (finding.kind, finding.rank, finding.source) == (SlowKind.LINK, receiver, 2)
        assert finding.evidence["first_dispatch_s"] < 0.5 * finding.evidence["wait_dispatch_s"]
        assert "first bytes come in time" in words_of(finding)


def test_a_link_that_begins_late_says_so() -> None:
    (window,) = play(1, 4, Fault(ranks=(0,), source=2, link_s=12e-6), seed=5)
    (finding,) = find_slow(window)
    assert "late from the first byte on" in words_of(finding)


def test_all_links_of_a_source_that_carry_slowly_are_links_and_no_slow_sender() -> None:
    """Waits alone say nothing of it: the others all wait alike, as for a rank that computes."""
    fault = Fault(ranks=(0, 1, 3), source=2, carry_s=6e-6)
    for window in play(10, 4, fault, seed=5):
        links = {(SlowKind.LINK, receiver, 2) for receiver in (0, 1, 3)}
        assert places_of(find_slow(window)) == links
        assert find_slow(replace(window, first_waits_s=window.waits_s)) == []


def test_a_slow_sender_sends_its_first_late_and_none_of_its_links_is_blamed() -> None:
    for window in play(10, 4, Fault(ranks=(2,), attention=1.2), seed=5):
        (finding,) = find_slow(window)
        assert finding.kind is SlowKind.SENDER
        assert finding.evidence["late_dispatch_s"] > 0.5 * finding.evidence["excess_s"]


def test_a_slow_link_makes_nobody_late_by_first_flags() -> None:
    """Two links of one source carry slowly, and its own work is a little longer than others'."""
    fault = Fault(ranks=(0, 1), source=2, carry_s=12e-6, attention=1.0)
    (window,) = play(1, 4, fault, seed=5)
    own = window.own_s.copy()
    own[:, Phase.DISPATCH, 2] *= 1.05
    by_first = find_slow(replace(window, own_s=own))
    assert all(found.kind is SlowKind.LINK for found in by_first)
    by_last = find_slow(replace(window, own_s=own, first_waits_s=window.waits_s))
    assert (SlowKind.SENDER, 2, -1) in places_of(by_last)


def test_more_rows_that_slow_the_rest_of_the_rank_down_are_one_finding() -> None:
    """As four H200 recorded it: experts with more rows, and more work before dispatch too."""
    (window,) = play(1, 4, Fault(ranks=(3,), rows=1.42, attention=1.25), seed=5)
    (finding,) = find_slow(window)
    assert finding.kind is SlowKind.RECEIVER
    assert finding.evidence["late_dispatch_s"] > 0.0


def test_a_rank_with_more_rows_that_sends_later_than_they_explain_is_a_slow_sender_too() -> None:
    (window,) = play(1, 4, Fault(ranks=(3,), rows=1.4, attention=1.5), seed=5)
    kinds = {finding.kind for finding in find_slow(window)}
    assert kinds == {SlowKind.RECEIVER, SlowKind.SENDER}


def test_whoever_comes_last_is_seen_to_send_for_long_and_no_link_is_blamed() -> None:
    """Of the others nothing is seen, as all of it has come before anybody waits for it."""
    (window,) = play(1, 4, Fault(ranks=(2,), attention=1.02), seed=5)
    waits, firsts = np.zeros_like(window.waits_s), np.zeros_like(window.waits_s)
    seen = 0.04 * float(window.own_s[:, Phase.DISPATCH].mean())
    waits[:, Phase.DISPATCH, :, 2] = seen
    waits[:, Phase.DISPATCH, 0, 1] = seen  # one that waits for another, too
    waits[:, Phase.DISPATCH, 2, 2] = 0.0
    assert find_slow(replace(window, waits_s=waits, first_waits_s=firsts)) == []
