"""plan_writes: all parts together write every byte once, and merging changes nothing but the
count.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.plan import Write, plan_head_writes, plan_writes, share_of_part

LAYOUT = KVLayout(dtype=KVDtype.FLOAT8_E4M3, block_size=1, num_layers=4, head_width=2)
NUM_BLOCKS = 24

block_lists = st.integers(0, NUM_BLOCKS).flatmap(
    lambda n: st.tuples(
        st.permutations(range(NUM_BLOCKS)).map(lambda ids: ids[:n]),
        # Mostly ascending, so that neighbours are common.
        st.one_of(
            st.permutations(range(NUM_BLOCKS)).map(lambda ids: ids[:n]),
            st.just(list(range(n))),
        ),
    )
)
layer_ranges = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 3), st.integers(1, 4)).filter(lambda r: r[0] < r[1]),
)


def copied_bytes(writes: Sequence[Write]) -> Counter[tuple[int, int]]:
    """How often each (source byte, destination byte) is copied."""
    return Counter(
        (write.src_offset + i, write.dst_offset + i)
        for write in writes
        for i in range(write.nbytes)
    )


def expected_bytes(
    src: Sequence[int], dst: Sequence[int], layers: tuple[int, int] | None
) -> Counter[tuple[int, int]]:
    first, end = layers or (0, LAYOUT.num_layers)
    inside = range(LAYOUT.layer_offset(first), LAYOUT.layer_offset(end))
    return Counter(
        (s * LAYOUT.block_bytes + i, d * LAYOUT.block_bytes + i)
        for s, d in zip(src, dst, strict=True)
        for i in inside
    )


@given(blocks=block_lists, layers=layer_ranges, num_parts=st.integers(1, 10))
def test_all_parts_together_write_each_byte_once(
    blocks: tuple[list[int], list[int]], layers: tuple[int, int] | None, num_parts: int
) -> None:
    src, dst = blocks
    writes = [
        write
        for part in range(num_parts)
        for write in plan_writes(LAYOUT, src, dst, layers=layers, part=part, num_parts=num_parts)
    ]
    assert copied_bytes(writes) == expected_bytes(src, dst, layers)


@given(blocks=block_lists, layers=layer_ranges)
def test_merging_keeps_the_bytes_and_leaves_nothing_to_merge(
    blocks: tuple[list[int], list[int]], layers: tuple[int, int] | None
) -> None:
    src, dst = blocks
    merged = plan_writes(LAYOUT, src, dst, layers=layers)
    plain = plan_writes(LAYOUT, src, dst, layers=layers, merge=False)
    assert len(plain) == len(src)
    assert copied_bytes(merged) == copied_bytes(plain)
    for first, second in itertools.pairwise(merged):
        assert (
            first.src_offset + first.nbytes != second.src_offset
            or first.dst_offset + first.nbytes != second.dst_offset
        )


@given(num_blocks=st.integers(0, 100), num_parts=st.integers(1, 16))
def test_shares_are_contiguous_and_balanced(num_blocks: int, num_parts: int) -> None:
    shares = [share_of_part(num_blocks, part, num_parts) for part in range(num_parts)]
    assert [i for share in shares for i in share] == list(range(num_blocks))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(
    blocks=block_lists, layers=layer_ranges, heads=st.integers(1, 3), num_parts=st.integers(1, 4)
)
def test_parts_with_heads_of_their_own_together_write_each_byte_of_every_block_once(
    blocks: tuple[list[int], list[int]],
    layers: tuple[int, int] | None,
    heads: int,
    num_parts: int,
) -> None:
    src, dst = blocks
    whole = replace(LAYOUT, block_size=3, num_heads=heads * num_parts)
    own, tile = whole.of_part(num_parts), 3 * whole.head_width
    first, end = layers or (0, whole.num_layers)
    expected = Counter(
        (
            part,
            s * own.block_bytes + own.layer_offset(layer) + head * tile + i,
            d * whole.block_bytes + whole.layer_offset(layer) + (part * heads + head) * tile + i,
        )
        for part, head, layer in itertools.product(
            range(num_parts), range(heads), range(first, end)
        )
        for s, d in zip(src, dst, strict=True)
        for i in range(tile)
    )
    got: Counter[tuple[int, int, int]] = Counter()
    for part in range(num_parts):
        writes = plan_head_writes(whole, src, dst, layers=layers, part=part, num_parts=num_parts)
        got.update((part, *pair) for pair in copied_bytes(writes).elements())
    assert got == expected
    targets = Counter(target for _, _, target in got)
    assert set(targets.values()) <= {1}
    assert len(targets) == len(dst) * (end - first) * whole.layer_bytes


def test_heads_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="3 heads cannot be divided over 2 parts"):
        plan_head_writes(replace(LAYOUT, num_heads=3), [1], [2], num_parts=2)
    with pytest.raises(ValueError, match="part = 2"):
        plan_head_writes(replace(LAYOUT, num_heads=4), [1], [2], part=2, num_parts=2)


def test_neighbours_on_both_sides_become_one_write() -> None:
    assert plan_writes(LAYOUT, [3, 4, 5], [7, 8, 9]) == [
        Write(3 * LAYOUT.block_bytes, 7 * LAYOUT.block_bytes, 3 * LAYOUT.block_bytes)
    ]
    assert len(plan_writes(LAYOUT, [3, 4, 5], [7, 9, 8])) == 3
    assert len(plan_writes(LAYOUT, [3, 4, 5], [7, 8, 9], layers=(0, 2))) == 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"src_block_ids": [1], "dst_block_ids": []}, "1 source blocks for 0"),
        ({"layers": (2, 2)}, "layers"),
        ({"layers": (0, 5)}, "layers"),
        ({"part": 1}, "part = 1"),
        ({"dst_block_ids": [-1]}, "negative"),
    ],
)
def test_bad_arguments(kwargs: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"src_block_ids": [1], "dst_block_ids": [2], **kwargs}
    with pytest.raises(ValueError, match=message):
        plan_writes(LAYOUT, **arguments)  # type: ignore[arg-type]
