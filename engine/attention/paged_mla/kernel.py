"""Attention of many queries to one shared row of latents a position, in Triton (flash-decoding).

Absorbed MLA is multi-query attention: all heads of all new tokens of a sequence read the same
latents, [C + R] numbers a position, of which the first C are the value as well. So a program has a
tile of rows (a row is a head of a new token) and walks over positions; a tile of latents is read
from memory once and is both operands of its two products. Softmax is online, in float32. What a
program walks over is a *part* (see `parts`): the end of one sequence, whole ones, the beginning of
another, so that the cost follows the contexts and all programs end together. A sequence that is
cut leaves its pieces in float32, with the logarithm of their weight, and a second kernel merges
them.

Latents in e4m3 are multiplied as float16, which holds them exactly, queries and probabilities too
(finer than bfloat16; queries are clamped to its range). A GPU that does not know e4m3 (Ampere)
reads bytes, and widens them to 1/256 of their value as products do (`triton_gemm.product`).

This module is compiled by Triton and is imported only where that is installed.
"""

import triton
import triton.language as tl

from engine.formats.triton_gemm.product import _widen
from engine.kernels.fused.launch import launched

PLAIN = tl.constexpr(0)
E4M3 = tl.constexpr(1)
BYTES = tl.constexpr(2)
"""How latents are stored: in the type of the queries, in e4m3, in e4m3 that the GPU cannot read."""

PART_INTS = tl.constexpr(8)
"""Integers of a part."""

AT_ONCE = tl.constexpr(4)
"""Pieces that are loaded together."""


@triton.jit
def _load_latents(place, mask, STORED: tl.constexpr):
    """Return latents in the type that is multiplied, 0 where the mask is false."""
    if STORED == PLAIN:
        return tl.load(place, mask=mask, other=0.0)
    else:
        bits = tl.load(place, mask=mask, other=0)
        if STORED == E4M3:
            return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            return tl.where((bits & 0x7F) == 0x7F, float("nan"), _widen(bits)).to(tl.float16)


@triton.jit
def _load_queries(source, mask, STORED: tl.constexpr):
    """Return queries in the type that is multiplied, 0 where the mask is false."""
    queries = tl.load(source, mask=mask, other=0.0)
    if STORED == PLAIN:
        return queries
    else:
        wide = queries.to(tl.float32)
        return tl.clamp(wide, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def _find_blocks(
    first, last, table, BLOCK: tl.constexpr, N: tl.constexpr, ONE_BLOCK: tl.constexpr
):  # fmt: skip
    """Return the blocks of the N positions from `first` on, up to the last one: one, or N."""
    if ONE_BLOCK:
        return tl.load(table + tl.minimum(first, last) // BLOCK).to(tl.int64)
    else:
        return tl.load(table + tl.minimum(first + tl.arange(0, N), last) // BLOCK).to(tl.int64)


@triton.jit
def _attend_to_piece(
    q_c, q_r, cache, table, start, stop, visible, scale, block_stride,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    ROW: tl.constexpr, STORED: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend to positions [start, stop): sums [M, C], row maxima of scores, and sums of weights.

    Queries come in two parts, [M, C] and [M, R]; `table` has the blocks of the sequence; of its
    positions each row sees the first `visible` [M]; `scale` holds log2(e).
    """
    sums = tl.zeros([M, C], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    # Known a step ahead: latents whose place had to be loaded first would not be on their way.
    last = tl.maximum(stop - 1, 0)
    block = _find_blocks(start, last, table, BLOCK, N, ONE_BLOCK)
    for first in tl.range(start, stop, N):
        positions = first + tl.arange(0, N)
        # What lies behind the last position is anybody's, NaN too, and 0 times NaN is NaN.
        is_position = (positions < stop)[:, None]
        row = first % BLOCK + tl.arange(0, N) if ONE_BLOCK else positions % BLOCK
        place = cache + block * block_stride + row * ROW
        block = _find_blocks(first + N, last, table, BLOCK, N, ONE_BLOCK)
        k_c = _load_latents(place[:, None] + tl.arange(0, C)[None, :], is_position, STORED)
        k_r = _load_latents(place[:, None] + C + tl.arange(0, R)[None, :], is_position, STORED)
        scores = tl.dot(q_r, tl.trans(k_r))
        scores = tl.dot(q_c, tl.trans(k_c), scores)
        scores = tl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen nothing yet: -inf minus -inf would be NaN.
        shift = tl.where(peak == float("-inf"), 0.0, peak) * scale
        shares = tl.exp2(scores * scale - shift[:, None])
        fade = tl.exp2(top * scale - shift)
        weight = weight * fade + tl.sum(shares, axis=1)
        sums = tl.dot(shares.to(k_c.dtype), k_c, sums * fade[:, None])
        top = peak
    return sums, top, weight


@triton.jit
def _store_rows(target, values, rows, is_row, C: tl.constexpr):
    """Write [M, C] numbers in the type of the target."""
    place = target + rows[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(place, values.to(target.dtype.element_ty), mask=is_row[:, None])


@launched("table_width")
def attend(
    q, cache, tables, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs,
    num_heads, scale, block_stride, table_width,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    ROW: tl.constexpr, PAGE: tl.constexpr, STORED: tl.constexpr, ONE_QUERY: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of rows of every sequence of a part; grid: tiles of rows, parts.

    Tiles of rows come first, so that those that read the same latents run side by side, and all
    but one find them in the cache. `pieces` [2 P, tiles * M, C] and `piece_logs` are for sequences
    that are cut: of a part, the first slot is for one that it goes on with, the second for one
    that it begins.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    first_row, max_rows = tile * M, tl.num_programs(0) * M
    first_seq = tl.load(parts + part * PART_INTS)
    last_seq = tl.load(parts + part * PART_INTS + 1)
    first_page = tl.load(parts + part * PART_INTS + 2)
    end_page = tl.load(parts + part * PART_INTS + 3)
    rows = tl.arange(0, M)
    for index in range(last_seq - first_seq + 1):
        seq = first_seq + index
        length = tl.load(seq_lens + seq)
        first_query, num_queries = seq, 1
        if not ONE_QUERY:
            first_query = tl.load(cu_seqlens_q + seq)
            num_queries = tl.load(cu_seqlens_q + seq + 1) - first_query
        num_pages = tl.maximum((length + PAGE - 1) // PAGE, 1)
        begin = tl.where(seq == first_seq, first_page, 0)
        end = tl.where(seq == last_seq, end_page, num_pages)
        num_rows = num_queries * num_heads - first_row
        is_row = rows < num_rows
        # The query of a row sees the positions up to its own; the last `num_queries` are theirs.
        visible = length - num_queries + (first_row + rows) // num_heads + 1
        seen = tl.max(tl.where(is_row, visible, 0), axis=0)
        place = first_query.to(tl.int64) * num_heads + first_row
        source = q + (place + rows)[:, None] * (C + R)
        q_c = _load_queries(source + tl.arange(0, C)[None, :], is_row[:, None], STORED)
        q_r = _load_queries(source + C + tl.arange(0, R)[None, :], is_row[:, None], STORED)
        sums, top, weight = _attend_to_piece(
            q_c, q_r, cache, tables + seq.to(tl.int64) * table_width, begin * PAGE,
            tl.minimum(end * PAGE, seen), visible, scale, block_stride,
            M, N, C, R, BLOCK, ROW, STORED, ONE_BLOCK,
        )  # fmt: skip
        factor = 256.0 if STORED == BYTES else 1.0
        saw_nothing = weight == 0.0
        weight = tl.where(saw_nothing, 1.0, weight)
        values = sums * (factor / weight)[:, None]
        if (begin > 0) | (end < num_pages):
            slot = (2 * part + tl.where(begin > 0, 0, 1)).to(tl.int64) * max_rows + first_row
            logs = tl.where(saw_nothing, float("-inf"), top * scale + tl.log2(weight))
            _store_rows(pieces + slot * C, values, rows, is_row, C)
            tl.store(piece_logs + slot + rows, logs, mask=is_row)
        else:
            _store_rows(out + place * C, values, rows, is_row, C)


@launched("max_rows")
def merge(
    parts, seq_lens, cu_seqlens_q, pieces, piece_logs, out, num_heads, max_rows,
    B: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, ONE_QUERY: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of a sequence that ends in a part it did not begin in; grid: rows, parts."""
    part = tl.program_id(1)
    seq = tl.load(parts + part * PART_INTS)
    last_seq = tl.load(parts + part * PART_INTS + 1)
    begin = tl.load(parts + part * PART_INTS + 2)
    end = tl.load(parts + part * PART_INTS + 3)
    num_before = tl.load(parts + part * PART_INTS + 4)
    if (begin == 0) | (seq > last_seq):
        return
    num_pages = tl.maximum((tl.load(seq_lens + seq) + PAGE - 1) // PAGE, 1)
    if (seq == last_seq) & (end < num_pages):
        return
    first_query, num_queries = seq, 1
    if not ONE_QUERY:
        first_query = tl.load(cu_seqlens_q + seq)
        num_queries = tl.load(cu_seqlens_q + seq + 1) - first_query
    rows = tl.program_id(0) * B + tl.arange(0, B)
    columns = tl.arange(0, C)[None, :]
    is_row = rows < num_queries * num_heads
    sums = tl.zeros([B, C], tl.float32)
    top = tl.full([B], float("-inf"), tl.float32)
    weight = tl.zeros([B], tl.float32)
    for first in range(0, num_before + 1, AT_ONCE):
        # Several at a time, so that their loads are under way together: a long context alone may
        # be cut for all of the GPU.
        for step in tl.static_range(AT_ONCE):
            index = first + step
            is_piece = is_row & (index <= num_before)
            slot = 2 * (part - num_before + index) + tl.where(index == 0, 1, 0)
            place = slot.to(tl.int64) * max_rows + rows
            log = tl.load(piece_logs + place, mask=is_piece, other=float("-inf"))
            source = pieces + place[:, None] * C + columns
            values = tl.load(source, mask=is_piece[:, None], other=0.0)
            peak = tl.maximum(top, log)
            shift = tl.where(peak == float("-inf"), 0.0, peak)
            fade, share = tl.exp2(top - shift), tl.exp2(log - shift)
            sums = sums * fade[:, None] + values * share[:, None]
            weight = weight * fade + share
            top = peak
    merged = sums / tl.where(weight == 0.0, 1.0, weight)[:, None]
    _store_rows(out + first_query.to(tl.int64) * num_heads * C, merged, rows, is_row, C)
