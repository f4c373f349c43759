"""Which bytes to copy: two lists of block ids become a short list of writes. Pure.

Where all ranks of a prefill worker hold the same KV, each sends a share: contiguous ranges of the
list, because neighbours in the list are often neighbours in memory on both sides, and then several
blocks are one write. Where each has heads of its own, all send from every block: in each layer
their heads are one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kv_transfer.layout import KVLayout


class Write(NamedTuple):
    """Copy ``nbytes`` from ``src_offset`` of our pool to ``dst_offset`` of the peer's (bytes from
    the pools' starts).
    """

    src_offset: int
    dst_offset: int
    nbytes: int


def share_of_part(num_blocks: int, part: int, num_parts: int) -> range:
    """Indices of the blocks that ``part`` of ``num_parts`` sends; the first parts may have one
    more.
    """
    if not 0 <= part < num_parts:
        raise ValueError(f"part = {part}: must be in [0, {num_parts})")
    each, num_larger = divmod(num_blocks, num_parts)
    start = part * each + min(part, num_larger)
    return range(start, start + each + (part < num_larger))


def plan_writes(
    layout: KVLayout,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    *,
    layers: tuple[int, int] | None = None,
    part: int = 0,
    num_parts: int = 1,
    merge: bool = True,
) -> list[Write]:
    """The writes of ``part`` that copy block ``src_block_ids[i]`` to ``dst_block_ids[i]``, for its
    share of the ``i``.

    ``layers`` is a half-open range of layers, None is all. Runs that touch on both sides become one
    write (only whole blocks can). The parts' writes together cover each byte of each block's layer
    range exactly once.

    Raises:
        ValueError: lengths differ, a layer range outside the layout, a bad part, a negative block
            id.
    """
    first_layer, end_layer = _check(layout, src_block_ids, dst_block_ids, layers)
    offset = layout.layer_offset(first_layer)
    nbytes = layout.layer_offset(end_layer) - offset
    block_bytes = layout.block_bytes
    writes: list[Write] = []
    for index in share_of_part(len(src_block_ids), part, num_parts):
        src_id, dst_id = src_block_ids[index], dst_block_ids[index]
        write = Write(src_id * block_bytes + offset, dst_id * block_bytes + offset, nbytes)
        last = writes[-1] if merge and writes else None
        if last is not None and _touch(last, write):
            writes[-1] = Write(last.src_offset, last.dst_offset, last.nbytes + nbytes)
        else:
            writes.append(write)
    return writes


def plan_head_writes(
    layout: KVLayout,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    *,
    layers: tuple[int, int] | None = None,
    part: int = 0,
    num_parts: int = 1,
) -> list[Write]:
    """The writes of ``part``, whose pool holds its share of the heads of every block: one for each
    block and layer, into its heads of the peer's block.

    ``layout`` is the peer's, with all heads; the rest is as for `plan_writes`.

    Raises:
        ValueError: as there, or heads that cannot be divided equally.
    """
    first_layer, end_layer = _check(layout, src_block_ids, dst_block_ids, layers)
    if not 0 <= part < num_parts:
        raise ValueError(f"part = {part}: must be in [0, {num_parts})")
    own = layout.of_part(num_parts)
    nbytes = own.layer_bytes
    return [
        Write(
            src_id * own.block_bytes + own.layer_offset(layer),
            dst_id * layout.block_bytes + layout.layer_offset(layer) + part * nbytes,
            nbytes,
        )
        for src_id, dst_id in zip(src_block_ids, dst_block_ids, strict=True)
        for layer in range(first_layer, end_layer)
    ]


def _check(
    layout: KVLayout,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    layers: tuple[int, int] | None,
) -> tuple[int, int]:
    """The range of layers, of blocks that can be copied."""
    if len(src_block_ids) != len(dst_block_ids):
        raise ValueError(
            f"{len(src_block_ids)} source blocks for {len(dst_block_ids)} destinations"
        )
    for src_id, dst_id in zip(src_block_ids, dst_block_ids, strict=True):
        if src_id < 0 or dst_id < 0:
            raise ValueError(f"block ids must not be negative: {src_id} -> {dst_id}")
    first, end = layers if layers is not None else (0, layout.num_layers)
    if not 0 <= first < end <= layout.num_layers:
        raise ValueError(f"layers = {layers}: must be a range within [0, {layout.num_layers})")
    return first, end


def _touch(first: Write, second: Write) -> bool:
    return (
        first.src_offset + first.nbytes == second.src_offset
        and first.dst_offset + first.nbytes == second.dst_offset
    )
