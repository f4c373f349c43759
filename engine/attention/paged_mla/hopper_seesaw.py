"""The kernel for Hopper's tensor cores in which two groups of four warps take turns.

In `hopper_kernel` both groups make half of a tile's scores, which is 64 x 32 a step, and the tensor
cores wait: for shared memory, which brings 4 KB of operands for 16 cycles of work, and while
everybody computes probabilities. Here each tile of 64 positions is one group's: that group makes
its scores, 64 x 64 a step, and its probabilities, while the tensor cores work for the other one.
Each group holds half of the sums, [64, 256], so both multiply every tile's values: its own tiles'
probabilities stay in registers, the other's come by shared memory, where they take the place of
the tile's last 64 columns. The largest score runs from tile to tile, from group to group. A warp of
its own brings tiles.

Shared memory holds, in KiB: queries 72, two tiles 144; and maxima, fading and weights of rows.

Latents are in the type of the queries. Arguments and results are those of `hopper_kernel.attend`.
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

HALF = gl.constexpr(256)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_SHARES = gl.constexpr(gl.DotOperandLayout(0, _SUMS.value, 2))
_ROWS = gl.constexpr(gl.SliceLayout(1, _SUMS.value))
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Eight numbers of 16 bits a thread.
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [2, 2], [1, 0]))
_NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# Barriers; of those with a plural there are two, by slot or by group.
FULL = gl.constexpr(0)
EMPTY = gl.constexpr(2)
READY = gl.constexpr(4)
DONE = gl.constexpr(6)
QUERIES_READY = gl.constexpr(8)
QUERIES_FREE = gl.constexpr(9)
NUM_BARS = gl.constexpr(10)

# Rows of numbers that groups tell one another, two each.
TOPS = gl.constexpr(0)
FADES = gl.constexpr(2)
WEIGHTS = gl.constexpr(4)


@gluon.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "cu_seqlens_q", "parts"],
)
def attend(
    c_desc, r_desc, q, tables, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs,
    num_heads, scale, block_rows, table_width,
    BLOCK_TILES: gl.constexpr, ONE_QUERY: gl.constexpr,
):  # fmt: skip
    """Attend to latents in the type of the queries; see `hopper_kernel.attend`."""
    T: gl.constexpr = q.dtype.element_ty
    q_c = gl.allocate_shared_memory(T, [M, C], _SHARED)
    q_r = gl.allocate_shared_memory(T, [M, R], _SHARED)
    k_c = gl.allocate_shared_memory(T, [2, N, C], _SHARED)
    k_r = gl.allocate_shared_memory(T, [2, N, R], _SHARED)
    marks = gl.allocate_shared_memory(gl.float32, [6, M], _LINE)
    bars = _make_barriers(1)
    gl.warp_specialize(
        [
            (attend_half, (
                q, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs, num_heads, scale,
                q_c, q_r, k_c, k_r, marks, bars, 0, ONE_QUERY,
            )),
            (attend_half, (
                q, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs, num_heads, scale,
                q_c, q_r, k_c, k_r, marks, bars, 1, ONE_QUERY,
            )),
            (_bring_tiles, (
                c_desc, r_desc, tables, seq_lens, cu_seqlens_q, parts, num_heads, block_rows,
                table_width, k_c, k_r, bars, BLOCK_TILES, ONE_QUERY,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _make_barriers(NUM_BRINGING: gl.constexpr):
    """Return the barriers; a tile is there when NUM_BRINGING have arrived."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM_BARS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(bars.index(FULL + slot), count=NUM_BRINGING)
        mbarrier.init(bars.index(EMPTY + slot), count=2)
        mbarrier.init(bars.index(READY + slot), count=1)
        mbarrier.init(bars.index(DONE + slot), count=1)
    mbarrier.init(bars.index(QUERIES_READY), count=1)
    mbarrier.init(bars.index(QUERIES_FREE), count=1)
    hopper.fence_async_shared()
    _synchronize()
    return bars


@gluon.jit
def _bring_tiles(
    c_desc, r_desc, tables, seq_lens, cu_seqlens_q, parts, num_heads, block_rows, table_width,
    k_c, k_r, bars, BLOCK_TILES: gl.constexpr, ONE_QUERY: gl.constexpr,
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
            mbarrier.wait(bars.index(EMPTY + slot), (uses + 1) & 1, pred=True)
            full = bars.index(FULL + slot)
            mbarrier.expect(full, N * (C + R) * 2, pred=True)
            tma.async_copy_global_to_shared(r_desc, [row, C], full, k_r.index(slot), pred=True)
            tma.async_copy_global_to_shared(c_desc, [row, 0], full, k_c.index(slot), pred=True)
        uses_0 += (num_tiles + 1) // 2
        uses_1 += num_tiles // 2


@gluon.jit
def attend_half(
    q, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs, num_heads, scale,
    q_c, q_r, k_c, k_r, marks, bars, SIDE: gl.constexpr, ONE_QUERY: gl.constexpr,
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
                sums, weights, top, visible, scale, q_c, q_r, k_c, k_r, marks, bars,
                begin, num_tiles, stop, uses_0, uses_1,
            )  # fmt: skip
        else:
            sums, weights, top = _walk_second(
                sums, weights, top, visible, scale, q_c, q_r, k_c, k_r, marks, bars,
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
def _tell(bar):
    """Arrive at a barrier when all of this group have come so far."""
    _synchronize()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _load_queries(source, num_rows, q_c, q_r):
    """Put a tile of queries into shared memory, zeros where there is no row."""
    for part in gl.static_range(4):
        rows = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, _WIDE))[:, None]
        columns = gl.arange(0, C, gl.SliceLayout(0, _WIDE))[None, :]
        values = gl.load(source + rows * (C + R) + columns, mask=rows < num_rows, other=0.0)
        q_c.slice(part * 16, 16, dim=0).store(_convert_queries(values, q_c.dtype))
    rows = gl.arange(0, M, gl.SliceLayout(1, _NARROW))[:, None]
    columns = gl.arange(0, R, gl.SliceLayout(0, _NARROW))[None, :]
    values = gl.load(source + C + rows * (C + R) + columns, mask=rows < num_rows, other=0.0)
    q_r.store(_convert_queries(values, q_r.dtype))
    hopper.fence_async_shared()


@gluon.jit
def _start_scores(q_c, q_r, k_c, k_r):
    """Begin to multiply queries and a tile of latents: [M, N], in two steps of the tensor cores."""
    zeros = gl.zeros([M, N], gl.float32, _SCORES)
    scores = hopper.warpgroup_mma(q_r, k_r.permute([1, 0]), zeros, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q_c, k_c.permute([1, 0]), scores, is_async=True)


@gluon.jit
def _weigh(scores, first, visible, top, scale):
    """Return weights of a tile's positions, what earlier ones fade by, and the largest score."""
    positions = first + gl.arange(0, N, gl.SliceLayout(0, _SCORES))
    scores = gl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
    peak = gl.maximum(top, gl.max(scores, axis=1))
    # A row that has seen nothing yet: -inf minus -inf would be NaN.
    shift = gl.where(peak == float("-inf"), 0.0, peak) * scale
    shares = gl.exp2(scores * scale - shift[:, None])
    return shares, gl.exp2(top * scale - shift), peak


@gluon.jit
def _publish(shares, fade, top, k_c, k_r, marks, bars, num_kept, SIDE: gl.constexpr):
    """Give the other group a tile's weights, in place of its last columns."""
    _synchronize()  # all warps of this group have read the columns that weights replace
    k_r.store(shares)
    marks.index(FADES + SIDE).store(fade)
    marks.index(TOPS + SIDE).store(top)
    # What lies behind the last position is anybody's, NaN too, and 0 times NaN is NaN. (Scores of
    # such rows are masked, whatever they are.)
    if num_kept < N:
        _clear_rows(k_c, num_kept, _WIDE)
    hopper.fence_async_shared()
    _tell(bars.index(READY + SIDE))


@gluon.jit
def _faded(sums, fade):
    """Return rows times a factor of each."""
    return sums * gl.convert_layout(fade, _ROWS)[:, None]


@gluon.jit
def _take_other(bars, marks, uses, OTHER: gl.constexpr):
    """Return, once the other group's tile is weighed, what others fade by, and the maximum."""
    mbarrier.wait(bars.index(FULL + OTHER), uses & 1, pred=True)
    mbarrier.wait(bars.index(READY + OTHER), uses & 1, pred=True)
    layout: gl.constexpr = gl.SliceLayout(1, _SCORES)
    return marks.index(FADES + OTHER).load(layout), marks.index(TOPS + OTHER).load(layout)


@gluon.jit
def _walk_first(
    sums, weights, top, visible, scale, q_c, q_r, k_c, k_r, marks, bars,
    begin, num_tiles, stop, uses_0, uses_1,
):  # fmt: skip
    """Attend to a piece's tiles; own are the first, the third, ..."""
    own, other = k_c.index(0), k_c.index(1)
    for pair in range((num_tiles + 1) // 2):
        first = (begin + 2 * pair) * N
        mbarrier.wait(bars.index(FULL), (uses_0 + pair) & 1, pred=True)
        scores = _start_scores(q_c, q_r, own, k_r.index(0))
        scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
        shares, fade, top = _weigh(scores, first, visible, top, scale)
        weights = weights * fade + gl.sum(shares, axis=1)
        shares = shares.to(q_c.dtype)
        _publish(shares, fade, top, own, k_r.index(0), marks, bars, stop - first, 0)
        shares = gl.convert_layout(shares, _SHARES)
        mine = own.slice(0, HALF, dim=1)
        sums = hopper.warpgroup_mma(shares, mine, _faded(sums, fade), is_async=True)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        _tell(bars.index(EMPTY))
        if 2 * pair + 1 < num_tiles:
            fade, top = _take_other(bars, marks, uses_1 + pair, 1)
            weights *= fade
            mine = other.slice(0, HALF, dim=1)
            sums = hopper.warpgroup_mma(k_r.index(1), mine, _faded(sums, fade), is_async=True)
            sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
            _tell(bars.index(EMPTY + 1))
    return sums, weights, top


@gluon.jit
def _walk_second(
    sums, weights, top, visible, scale, q_c, q_r, k_c, k_r, marks, bars,
    begin, num_tiles, stop, uses_0, uses_1,
):  # fmt: skip
    """Attend to a piece's tiles; own are the second, the fourth, ..."""
    own, other = k_c.index(1), k_c.index(0)
    for pair in range(num_tiles // 2):
        first = (begin + 2 * pair + 1) * N
        mbarrier.wait(bars.index(FULL + 1), (uses_1 + pair) & 1, pred=True)
        scores = _start_scores(q_c, q_r, own, k_r.index(1))
        fade, top = _take_other(bars, marks, uses_0 + pair, 0)
        scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
        weights *= fade
        mine = other.slice(HALF, HALF, dim=1)
        sums_soon = hopper.warpgroup_mma(k_r.index(0), mine, _faded(sums, fade), is_async=True)
        shares, fade, top = _weigh(scores, first, visible, top, scale)
        weights = weights * fade + gl.sum(shares, axis=1)
        shares = shares.to(q_c.dtype)
        _publish(shares, fade, top, own, k_r.index(1), marks, bars, stop - first, 1)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums_soon,))
        _tell(bars.index(EMPTY))
        shares = gl.convert_layout(shares, _SHARES)
        mine = own.slice(HALF, HALF, dim=1)
        sums = hopper.warpgroup_mma(shares, mine, _faded(sums, fade), is_async=True)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        _tell(bars.index(EMPTY + 1))
    if num_tiles % 2 == 1:
        fade, top = _take_other(bars, marks, uses_0 + num_tiles // 2, 0)
        weights *= fade
        mine = other.slice(HALF, HALF, dim=1)
        sums = hopper.warpgroup_mma(k_r.index(0), mine, _faded(sums, fade), is_async=True)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        _tell(bars.index(EMPTY))
    return sums, weights, top


@gluon.jit
def _exchange_weights(weights, marks, bars, index, SIDE: gl.constexpr):
    """Return the weights of the other group's tiles."""
    marks.index(WEIGHTS + SIDE).store(weights)
    _tell(bars.index(DONE + SIDE))
    mbarrier.wait(bars.index(DONE + 1 - SIDE), index & 1, pred=True)
    return marks.index(WEIGHTS + 1 - SIDE).load(gl.SliceLayout(1, _SCORES))


@gluon.jit
def _finish(
    sums, weight, top, scale, num_rows, is_cut, out, piece, piece_logs, SIDE: gl.constexpr
):  # fmt: skip
    """Write half of the columns to the result, or, of a sequence that is cut, to its piece."""
    saw_nothing = weight == 0.0
    weight = gl.where(saw_nothing, 1.0, weight)
    logs = gl.where(saw_nothing, float("-inf"), top * scale + gl.log2(weight))
    values = _faded(sums, 1.0 / weight)
    rows = gl.arange(0, M, gl.SliceLayout(1, _SUMS))[:, None]
    columns = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(0, _SUMS))[None, :]
    place = rows * C + columns
    if is_cut:
        gl.store(piece + place, values, mask=rows < num_rows)
        if SIDE == 0:
            log_rows = gl.arange(0, M, gl.SliceLayout(1, _SCORES))
            gl.store(piece_logs + log_rows, logs, mask=log_rows < num_rows)
    else:
        gl.store(out + place, values.to(out.dtype.element_ty), mask=rows < num_rows)
