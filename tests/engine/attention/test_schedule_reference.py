"""The plain schedule: it covers every page once, and nothing that was tried is cheaper."""

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.schedule_reference import (
    MAX_SPARE,
    OVERHEAD,
    PAGE,
    Schedule,
    best_schedule,
    count_pages,
    even_schedule,
    fill,
    least_capacity,
    tabulate,
)

pages_of_sequences = st.lists(st.integers(1, 90), min_size=1, max_size=90)
numbers_of_parts = st.integers(1, 70)


def check(schedule: Schedule, pages: list[int], num_parts: int) -> None:
    """Every page once and in order, no part too full, pieces counted."""
    pieces = list(chain(*schedule.parts))
    covered = [(p.sequence, page) for p in pieces for page in range(p.begin, p.end)]
    assert covered == [(s, page) for s, count in enumerate(pages) for page in range(count)]
    assert len(schedule.parts) <= num_parts
    for part in schedule.parts:
        assert part
        assert sum(p.end - p.begin + OVERHEAD for p in part) <= schedule.capacity
    for sequence, count in enumerate(schedule.num_pieces):
        assert [p.index for p in pieces if p.sequence == sequence] == list(range(count))


def least_maximum(pages: list[int], num_parts: int) -> int:
    """Return the least capacity of whole sequences, by a recurrence over where parts begin."""
    best: list[float] = [0, *[float("inf")] * len(pages)]
    for _ in range(min(num_parts, len(pages))):
        better = best.copy()
        for end in range(1, len(pages) + 1):
            load = 0
            for begin in range(end - 1, -1, -1):
                load += pages[begin] + OVERHEAD
                better[end] = min(better[end], max(best[begin], load))
        best = better
    return int(best[-1])


@given(pages_of_sequences, numbers_of_parts)
def test_both_schedules_cover_every_page_once(pages: list[int], num_parts: int) -> None:
    for schedule in (best_schedule(pages, num_parts), even_schedule(pages, num_parts)):
        check(schedule, pages, num_parts)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=20), st.integers(1, 24))
def test_whole_sequences_fill_the_least_maximum(pages: list[int], num_parts: int) -> None:
    least = least_maximum(pages, num_parts)
    assert len(fill(pages, least, cuts=False).parts) <= num_parts
    if least - 1 >= max(pages) + OVERHEAD:
        assert len(fill(pages, least - 1, cuts=False).parts) > num_parts


@given(pages_of_sequences, numbers_of_parts)
def test_the_choice_is_the_cheapest(pages: list[int], num_parts: int) -> None:
    chosen = best_schedule(pages, num_parts)
    assert chosen.cost <= even_schedule(pages, num_parts).cost
    bound = least_capacity(pages, num_parts)
    for capacity in range(bound, bound + MAX_SPARE + 1):
        whole = capacity >= max(pages) + OVERHEAD
        for schedule in [fill(pages, capacity, cuts=cuts) for cuts in ([True, False][: 1 + whole])]:
            assert len(schedule.parts) > num_parts or chosen.cost <= schedule.cost
            is_equal = schedule.cost == chosen.cost and len(schedule.parts) <= num_parts
            assert not is_equal or max(schedule.num_pieces) > 1 or max(chosen.num_pieces) == 1


@given(pages_of_sequences, numbers_of_parts)
def test_a_table_says_what_the_schedule_does(pages: list[int], num_parts: int) -> None:
    """Read it as the attention kernel does."""
    schedule = best_schedule(pages, num_parts)
    rows, sums = tabulate(schedule, num_parts)
    assert [len(row) for row in rows] == [8] * num_parts
    assert [b - a for a, b in pairwise(sums)] == schedule.num_pieces
    covered = []
    for first, last, begin, end, index, is_first_cut, is_last_cut, _ in rows:
        if first >= len(pages):
            continue
        for sequence in range(first, last + 1):
            start = begin if sequence == first else 0
            stop = end if sequence == last else pages[sequence]
            is_cut = is_first_cut if sequence == first else is_last_cut if sequence == last else 0
            assert is_cut == (schedule.num_pieces[sequence] > 1)
            piece = index if sequence == first else 0
            assert sums[sequence] + piece < sums[sequence + 1]
            covered += [(sequence, page, piece) for page in range(start, stop)]
    pieces = chain(*schedule.parts)
    assert covered == [(p.sequence, n, p.index) for p in pieces for n in range(p.begin, p.end)]


@pytest.mark.parametrize(
    ("seq_lens", "capacity", "even_capacity", "most"),
    [
        ([2048] * 64, 37, 41, 1),
        ([2000] * 32, 21, 23, 2),
        ([4000] * 16, 21, 22, 4),
        ([2000] * 128, 74, 77, 1),
    ],
)
def test_known_steps(seq_lens: list[int], capacity: int, even_capacity: int, most: int) -> None:
    pages = count_pages(seq_lens)
    chosen = best_schedule(pages, 66)
    assert (chosen.capacity, max(chosen.num_pieces)) == (capacity, most)
    assert even_schedule(pages, 66).capacity == even_capacity


def test_pages_of_lengths() -> None:
    assert count_pages([0, 1, PAGE, PAGE + 1]) == [1, 1, 1, 2]


def test_a_sequence_longer_than_a_part_needs_cuts() -> None:
    with pytest.raises(ValueError, match="8 pages in parts of 12"):
        fill([8], 12, cuts=False)
