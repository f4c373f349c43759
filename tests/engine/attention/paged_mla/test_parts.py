"""Parts cover every page of every sequence once, and their pieces can be found again."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.paged_mla.parts import PART_INTS, count_parts, parts_on_host
from engine.attention.schedule_reference import PAGE, count_pages

SEQUENCES = st.lists(
    st.tuples(st.integers(1, 170), st.integers(0, 3000), st.integers(1, 400)), min_size=1
)


@given(sequences=SEQUENCES, num_places=st.sampled_from([1, 6, 108, 132]))
def test_every_page_is_in_one_part(sequences: list[tuple[int, int, int]], num_places: int) -> None:
    lengths = [(queries, queries + prefix) for queries, prefix, _ in sequences]
    tiles = [count for _, _, count in sequences]
    table, may_cut = parts_on_host(lengths, tiles, num_places)
    assert table.shape[1] == PART_INTS
    pages = count_pages([positions for _, positions in lengths])
    seen: dict[int, list[tuple[int, int]]] = {}
    for part, (first, last, begin, end, before, *_) in enumerate(table.tolist()):
        for seq in range(first, last + 1):
            start = begin if seq == first else 0
            stop = end if seq == last else pages[seq]
            assert start < stop
            # As the kernel that merges counts back: one piece in each part before.
            pieces = seen.setdefault(seq, [])
            assert len(pieces) == (before if seq == first else 0)
            assert not pieces or table[part - len(pieces)][1] == seq
            pieces.append((start, stop))
    for seq, count in enumerate(pages):
        assert seen[seq][0][0] == 0
        assert seen[seq][-1][1] == count
        assert all(before[1] == after[0] for before, after in pairwise(seen[seq]))
        assert may_cut or len(seen[seq]) == 1


@given(sequences=SEQUENCES, num_places=st.sampled_from([6, 108, 132]))
def test_what_pieces_take_does_not_grow_with_the_step(
    sequences: list[tuple[int, int, int]], num_places: int
) -> None:
    lengths = [(queries, queries + prefix) for queries, prefix, _ in sequences]
    tiles = [count for _, _, count in sequences]
    table, may_cut = parts_on_host(lengths, tiles, num_places)
    slots = 2 * len(table) * max(tiles)
    assert not may_cut or slots <= 4 * num_places


def test_one_long_context_is_cut_for_all_of_the_gpu() -> None:
    table, may_cut = parts_on_host([(10, 160_000)], [3], 132)
    assert may_cut
    assert len(table) == 44
    sizes = [end - begin for _, _, begin, end, *_ in table.tolist()]
    assert max(sizes) - min(sizes[:-1]) == 0
    assert sum(sizes) == 160_000 // PAGE


def test_with_programs_enough_sequences_stay_whole_and_the_longest_begin() -> None:
    table, may_cut = parts_on_host([(100, 300), (100, 5000), (100, 700)], [100] * 3, 132)
    assert not may_cut
    assert table[:, 0].tolist() == table[:, 1].tolist() == [1, 2, 0]


@pytest.mark.parametrize(("places", "tiles", "parts"), [(132, 2, 66), (132, 1, 132), (132, 340, 1)])
def test_parts_of_a_decode_step(places: int, tiles: int, parts: int) -> None:
    assert count_parts(places, tiles) == parts
