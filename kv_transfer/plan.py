"""Which bytes to copy: two lists of block ids become a short list of writes. Pure.

All ranks of a prefill worker hold the same KV, so each sends a share: contiguous ranges of the
list, because neighbours in the list are often neighbours in memory on both sides, and then several
blocks are one write.
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
    if len(src_block_ids) != len(dst_block_ids):
        raise ValueError(
            f"{len(src_block_ids)} source blocks for {len(dst_block_ids)} destinations"
        )
    first_layer, end_layer = layers if layers is not None else (0, layout.num_layers)
    if not 0 <= first_layer < end_layer <= layout.num_layers:
        raise ValueError(f"layers = {layers}: must be a range within [0, {layout.num_layers})")
    offset = layout.layer_offset(first_layer)
    nbytes = layout.layer_offset(end_layer) - offset
    block_bytes = layout.block_bytes
    writes: list[Write] = []
    for index in share_of_part(len(src_block_ids), part, num_parts):
        src_id, dst_id = src_block_ids[index], dst_block_ids[index]
        if src_id < 0 or dst_id < 0:
            raise ValueError(f"block ids must not be negative: {src_id} -> {dst_id}")
        write = Write(src_id * block_bytes + offset, dst_id * block_bytes + offset, nbytes)
        last = writes[-1] if merge and writes else None
        if last is not None and _touch(last, write):
            writes[-1] = Write(last.src_offset, last.dst_offset, last.nbytes + nbytes)
        else:
            writes.append(write)
    return writes


def _touch(first: Write, second: Write) -> bool:
    return (
        first.src_offset + first.nbytes == second.src_offset
        and first.dst_offset + first.nbytes == second.dst_offset
    )
