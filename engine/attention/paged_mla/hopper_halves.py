"""The kernel of `hopper_seesaw`, with tiles that come and go by halves of their columns.

A half is free as soon as the group whose sums it belongs to has multiplied it, and scores begin
with the half that is there: a tile's 72 KB come in beside products of the same slot's tiles.
Probabilities of the first slot's tiles lie where the second group reads them, and leave with its
half; those of the second slot's with the first group's half.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from engine.attention.paged_mla.hopper_kernel import (
    _SHARED,
    PART_INTS,
    C,
    M,
    N,
    R,
    _clear_rows,
    _convert_queries,
    _find_piece,
    _find_slot,
    _synchronize,
)
from engine.attention.paged_mla.hopper_seesaw import (
    _LINE,
    _NARROW,
    _SCORES,
    _SHARES,
    _SUMS,
    _WIDE,
    FADES,
    HALF,
    QUERIES_FREE,
    QUERIES_READY,
    READY,
    TOPS,
    _exchange_weights,
    _faded,
    _finish,
    _tell,
    _weigh,
)

WIDTH = 256
"""Columns of a tile that come at a time."""

# Barriers of halves: number, plus 2 for the right half, plus the slot.
FULL = gl.constexpr(10)
FREE = gl.constexpr(14)
NUM_BARS = gl.constexpr(18)


@gluon.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "cu_seqlens_q", "parts"],
)
def attend(
    c_desc, r_desc, q, tables, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs,
    num_heads, scale, block_rows, table_width,
    BLOCK_TILES: gl.constexpr, ONE_QUERY: gl.constexpr,
):  # fmt: skip
    """Attend to latents in the type of the queries; `c_desc` brings [64, 256]."""
    T: gl.constexpr = q.dtype.element_ty
    q_c = gl.allocate_shared_memory(T, [2, M, HALF], _SHARED)
    q_r = gl.allocate_shared_memory(T, [M, R], _SHARED)
    k_left = gl.allocate_shared_memory(T, [2, N, HALF], _SHARED)
    k_right = gl.allocate_shared_memory(T, [2, N, HALF], _SHARED)
    k_r = gl.allocate_shared_memory(T, [2, N, R], _SHARED)
    marks = gl.allocate_shared_memory(gl.float32, [6, M], _LINE)
    bars = _make_barriers()
    gl.warp_specialize(
        [
            (attend_half, (
                q, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs, num_heads, scale,
                q_c, q_r, k_left, k_right, k_r, marks, bars, 0, ONE_QUERY,
            )),
            (attend_half, (
                q, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs, num_heads, scale,
                q_c, q_r, k_left, k_right, k_r, marks, bars, 1, ONE_QUERY,
            )),
            (_bring_tiles, (
                c_desc, r_desc, tables, seq_lens, cu_seqlens_q, parts, num_heads, block_rows,
                table_width, k_left, k_right, k_r, bars, BLOCK_TILES, ONE_QUERY,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _make_barriers():
    """Return the barriers, of which each counts one."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARS, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(NUM_BARS):
        mbarrier.init(bars.index(bar), count=1)
    hopper.fence_async_shared()
    _synchronize()
    return bars


@gluon.jit
def _bring_tiles(
    c_desc, r_desc, tables, seq_lens, cu_seqlens_q, parts, num_heads, block_rows, table_width,
    k_left, k_right, k_r, bars, BLOCK_TILES: gl.constexpr, ONE_QUERY: gl.constexpr,
):  # fmt: skip
    """Have tiles brought in, each piece's first one into the first slot."""
    first_row = gl.program_id(0) * M
    parts += gl.program_id(1) * PART_INTS
    first_seq, last_seq = gl.load(parts), gl.load(parts + 1)
    uses_0 = first_row * 0
    uses_1 = first_row * 0
    for index in range(last_seq - first_seq + 1):
        seq = first_seq + index
        _, _, _, begin, num_tiles, _, _, _ = _find_piece(
            seq, parts, seq_lens, cu_seqlens_q, num_heads, first_row, ONE_QUERY
        )
        table = tables + seq.to(gl.int64) * table_width
        for tile in range(num_tiles):
            slot = tile % 2
            block = gl.load(table + (begin + tile) // BLOCK_TILES)
            row = block * block_rows + (begin + tile) % BLOCK_TILES * N
            uses = gl.where(slot == 0, uses_0, uses_1) + tile // 2
            phase = (uses + 1) & 1
            # The last columns come with the half that is freed together with them.
            left, right = bars.index(FULL + slot), bars.index(FULL + 2 + slot)
            mbarrier.wait(bars.index(FREE + slot), phase, pred=True)
            mbarrier.expect(left, N * HALF * 2, pred=slot == 0)
            mbarrier.expect(left, N * (HALF + R) * 2, pred=slot == 1)
            tma.async_copy_global_to_shared(c_desc, [row, 0], left, k_left.index(slot), pred=True)
            tma.async_copy_global_to_shared(r_desc, [row, C], left, k_r.index(slot), pred=slot == 1)
            mbarrier.wait(bars.index(FREE + 2 + slot), phase, pred=True)
            mbarrier.expect(right, N * HALF * 2, pred=slot == 1)
            mbarrier.expect(right, N * (HALF + R) * 2, pred=slot == 0)
            tma.async_copy_global_to_shared(
                c_desc, [row, HALF], right, k_right.index(slot), pred=True
            )
            tma.async_copy_global_to_shared(
                r_desc, [row, C], right, k_r.index(slot), pred=slot == 0
            )
        uses_0 += (num_tiles + 1) // 2
        uses_1 += num_tiles // 2


@gluon.jit
def attend_half(
    q, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs, num_heads, scale,
    q_c, q_r, k_left, k_right, k_r, marks, bars, SIDE: gl.constexpr, ONE_QUERY: gl.constexpr,
):  # fmt: skip
    """Attend, for the columns of one group."""
    part, first_row = gl.program_id(1), gl.program_id(0) * M
    parts += part * PART_INTS
    first_seq, last_seq = gl.load(parts), gl.load(parts + 1)
    uses_0 = first_row * 0
    uses_1 = first_row * 0
    for index in range(last_seq - first_seq + 1):
        seq = first_seq + index
        first_query, prefix, num_rows, begin, num_tiles, stop, goes_on, is_cut = _find_piece(
            seq, parts, seq_lens, cu_seqlens_q, num_heads, first_row, ONE_QUERY
        )
        row = first_query.to(gl.int64) * num_heads + first_row
        if SIDE == 0:
            mbarrier.wait(bars.index(QUERIES_FREE), (index + 1) & 1, pred=True)
            _load_queries(q + row * (C + R), num_rows, q_c, q_r)
            _tell(bars.index(QUERIES_READY))
        else:
            mbarrier.wait(bars.index(QUERIES_READY), index & 1, pred=True)
        rows = first_row + gl.arange(0, M, gl.SliceLayout(1, _SCORES))
        visible = prefix + rows // num_heads + 1
        sums = gl.zeros([M, HALF], gl.float32, _SUMS)
        weights = gl.zeros([M], gl.float32, gl.SliceLayout(1, _SCORES))
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
        if SIDE == 0:
            sums, weights, top = _walk_first(
                sums, weights, top, visible, scale, q_c, q_r, k_left, k_right, k_r, marks, bars,
                begin, num_tiles, stop, uses_0, uses_1,
            )  # fmt: skip
        else:
            sums, weights, top = _walk_second(
                sums, weights, top, visible, scale, q_c, q_r, k_left, k_right, k_r, marks, bars,
                begin, num_tiles, stop, uses_0, uses_1,
            )  # fmt: skip
        uses_0 += (num_tiles + 1) // 2
        uses_1 += num_tiles // 2
        weights += _exchange_weights(weights, marks, bars, index, SIDE)
        place = _find_slot(part, goes_on, first_row)
        _finish(sums, weights, top, scale, num_rows, is_cut, out + row * C, pieces + place * C,
                piece_logs + place, SIDE)  # fmt: skip
        if SIDE == 1:
            _tell(bars.index(QUERIES_FREE))


@gluon.jit
def _load_queries(source, num_rows, q_c, q_r):
    """Put a tile of queries into shared memory, zeros where there is no row."""
    for half in gl.static_range(2):
        for part in gl.static_range(4):
            rows = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, _WIDE))[:, None]
            columns = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, _WIDE))[None, :]
            values = gl.load(source + rows * (C + R) + columns, mask=rows < num_rows, other=0.0)
            some = q_c.index(half).slice(part * 16, 16, dim=0)
            some.store(_convert_queries(values, q_c.dtype))
    rows = gl.arange(0, M, gl.SliceLayout(1, _NARROW))[:, None]
    columns = gl.arange(0, R, gl.SliceLayout(0, _NARROW))[None, :]
    values = gl.load(source + C + rows * (C + R) + columns, mask=rows < num_rows, other=0.0)
    q_r.store(_convert_queries(values, q_r.dtype))
    hopper.fence_async_shared()


@gluon.jit
def _start_scores(q_c, q_r, k_left, k_right, k_r, bars, phase, SIDE: gl.constexpr):
    """Begin to multiply queries and an own tile of latents, [M, N], as its halves arrive."""
    left, right = k_left.index(SIDE).permute([1, 0]), k_right.index(SIDE).permute([1, 0])
    last = k_r.index(SIDE).permute([1, 0])
    zeros = gl.zeros([M, N], gl.float32, _SCORES)
    mbarrier.wait(bars.index(FULL + SIDE), phase, pred=True)
    scores = hopper.warpgroup_mma(q_c.index(0), left, zeros, use_acc=False, is_async=True)
    mbarrier.wait(bars.index(FULL + 2 + SIDE), phase, pred=True)
    scores = hopper.warpgroup_mma(q_c.index(1), right, scores, is_async=True)
    return hopper.warpgroup_mma(q_r, last, scores, is_async=True)


@gluon.jit
def _publish(
    shares, fade, top, k_left, k_right, k_r, marks, bars, num_kept, SIDE: gl.constexpr
):  # fmt: skip
    """Give the other group a tile's weights, in place of its last columns."""
    _synchronize()  # all warps of this group have read the columns that weights replace
    k_r.index(SIDE).store(shares)
    marks.index(FADES + SIDE).store(fade)
    marks.index(TOPS + SIDE).store(top)
    # What lies behind the last position is anybody's, NaN too, and 0 times NaN is NaN. (Scores of
    # such rows are masked, whatever they are.)
    if num_kept < N:
        _clear_rows(k_left.index(SIDE), num_kept, _WIDE)
        _clear_rows(k_right.index(SIDE), num_kept, _WIDE)
    hopper.fence_async_shared()
    _tell(bars.index(READY + SIDE))


@gluon.jit
def _take_other(bars, marks, uses, OTHER: gl.constexpr):
    """Return, once the other group's tile is weighed, what others fade by, and the maximum."""
    # The half of this group: the left one of the second slot, the right one of the first.
    mbarrier.wait(bars.index(FULL + 2 - OTHER), uses & 1, pred=True)
    mbarrier.wait(bars.index(READY + OTHER), uses & 1, pred=True)
    layout: gl.constexpr = gl.SliceLayout(1, _SCORES)
    return marks.index(FADES + OTHER).load(layout), marks.index(TOPS + OTHER).load(layout)


@gluon.jit
def _walk_first(
    sums, weights, top, visible, scale, q_c, q_r, k_left, k_right, k_r, marks, bars,
    begin, num_tiles, stop, uses_0, uses_1,
):  # fmt: skip
    """Attend to a piece's tiles; own are the first, the third, ..."""
    for pair in range((num_tiles + 1) // 2):
        first = (begin + 2 * pair) * N
        scores = _start_scores(q_c, q_r, k_left, k_right, k_r, bars, (uses_0 + pair) & 1, 0)
        scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
        shares, fade, top = _weigh(scores, first, visible, top, scale)
        weights = weights * fade + gl.sum(shares, axis=1)
        shares = shares.to(q_c.dtype)
        _publish(shares, fade, top, k_left, k_right, k_r, marks, bars, stop - first, 0)
        shares = gl.convert_layout(shares, _SHARES)
        sums = hopper.warpgroup_mma(shares, k_left.index(0), _faded(sums, fade), is_async=True)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        _tell(bars.index(FREE))
        if 2 * pair + 1 < num_tiles:
            fade, top = _take_other(bars, marks, uses_1 + pair, 1)
            weights *= fade
            sums = hopper.warpgroup_mma(
                k_r.index(1), k_left.index(1), _faded(sums, fade), is_async=True
            )
            sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
            _tell(bars.index(FREE + 1))
    return sums, weights, top


@gluon.jit
def _walk_second(
    sums, weights, top, visible, scale, q_c, q_r, k_left, k_right, k_r, marks, bars,
    begin, num_tiles, stop, uses_0, uses_1,
):  # fmt: skip
    """Attend to a piece's tiles; own are the second, the fourth, ..."""
    other = k_right.index(0)
    for pair in range(num_tiles // 2):
        first = (begin + 2 * pair + 1) * N
        scores = _start_scores(q_c, q_r, k_left, k_right, k_r, bars, (uses_1 + pair) & 1, 1)
        fade, top = _take_other(bars, marks, uses_0 + pair, 0)
        scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
        weights *= fade
        sums_soon = hopper.warpgroup_mma(k_r.index(0), other, _faded(sums, fade), is_async=True)
        shares, fade, top = _weigh(scores, first, visible, top, scale)
        weights = weights * fade + gl.sum(shares, axis=1)
        shares = shares.to(q_c.dtype)
        _publish(shares, fade, top, k_left, k_right, k_r, marks, bars, stop - first, 1)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums_soon,))
        _tell(bars.index(FREE + 2))
        shares = gl.convert_layout(shares, _SHARES)
        sums = hopper.warpgroup_mma(shares, k_right.index(1), _faded(sums, fade), is_async=True)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        _tell(bars.index(FREE + 3))
    if num_tiles % 2 == 1:
        fade, top = _take_other(bars, marks, uses_0 + num_tiles // 2, 0)
        weights *= fade
        sums = hopper.warpgroup_mma(k_r.index(0), other, _faded(sums, fade), is_async=True)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        _tell(bars.index(FREE + 2))
    return sums, weights, top
