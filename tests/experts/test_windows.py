"""Windows hold what was counted between their ends, whoever else follows, and ends agree."""

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.counter import Counts, ExpertCounter
from experts.windows import LoadWindow, LoadWindows

LAYERS, EXPERTS, TOP_K = (1, 2, 5), 6, 2


class Gates:
    """Adds random counts, and remembers those of each pass."""

    def __init__(self, seed: int) -> None:
        self.counter = ExpertCounter(LAYERS, EXPERTS, TOP_K)
        self.windows = LoadWindows(self.counter)
        self.history: list[Counts] = []
        self._draw = random.Random(seed)

    def run(self, num_passes: int = 1) -> None:
        for _ in range(num_passes):
            counts = np.zeros((len(LAYERS), EXPERTS), dtype=np.int64)
            for row, layer in enumerate(LAYERS):
                ids = torch.tensor([self._draw.randrange(-1, EXPERTS) for _ in range(9)])
                bins = self.counter.bins(layer)
                bins.index_add_(0, ids % len(bins), torch.ones_like(ids))
                counts[row] = ids[ids >= 0].bincount(minlength=EXPERTS).numpy()
            self.history.append(counts)
            self.windows.passed()

    def check(self, windows: list[LoadWindow], every: int, since: int) -> None:
        """All whole windows since a pass, one after another, each with what was counted in it."""
        first = -(-since // every) * every
        ends = range(first + every, len(self.history) + 1, every)
        assert [(w.first_pass, w.end_pass) for w in windows] == [(e - every, e) for e in ends]
        for window in windows:
            passes = self.history[window.first_pass : window.end_pass]
            assert np.array_equal(window.counts_LE, np.sum(passes, axis=0))
            assert window.num_passes == every


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    followers=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5)), min_size=1, max_size=4),
)
def test_each_follower_gets_all_windows_since_it_came(
    seed: int, followers: list[tuple[int, int]]
) -> None:
    gates = Gates(seed)
    found: list[list[LoadWindow]] = []
    came: list[tuple[int, int]] = []
    for wait, every in followers:
        gates.run(wait)
        taken: list[LoadWindow] = []
        gates.windows.follow(every, taken.append)
        found.append(taken)
        came.append((every, len(gates.history)))
    gates.run(12)
    gates.windows.deliver(wait=True)
    for windows, (every, since) in zip(found, came, strict=True):
        gates.check(windows, every, since)


def test_what_was_counted_before_is_in_no_window() -> None:
    gates = Gates(1)
    gates.counter.bins(2)[3] += 1000  # as rehearsed steps do, before the first pass
    windows: list[LoadWindow] = []
    gates.windows.follow(2, windows.append)
    gates.run(4)
    gates.windows.deliver(wait=True)
    gates.check(windows, every=2, since=0)


def test_who_follows_no_more_hears_nothing() -> None:
    gates, windows = Gates(2), list[LoadWindow]()
    key = gates.windows.follow(1, windows.append)
    gates.run(2)
    gates.windows.deliver(wait=True)
    gates.windows.unfollow(key)
    gates.windows.unfollow(key)
    gates.run(3)
    gates.windows.deliver(wait=True)
    assert len(windows) == 2


def test_windows_of_ranks_with_the_same_bounds_add_up_to_what_all_got() -> None:
    ranks = [Gates(seed) for seed in (3, 4)]
    taken: list[list[LoadWindow]] = [[], []]
    for gates, windows in zip(ranks, taken, strict=True):
        gates.windows.follow(3, windows.append)
        gates.run(6)
        gates.windows.deliver(wait=True)
    second = [windows[1] for windows in taken]
    assert {(window.first_pass, window.end_pass) for window in second} == {(3, 6)}
    total = sum(window.counts_LE for window in second)
    assert np.array_equal(total, sum(np.sum(g.history[3:], axis=0) for g in ranks))
