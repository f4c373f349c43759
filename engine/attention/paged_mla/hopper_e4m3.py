"""The kernel for Hopper's tensor cores, latents in e4m3, widened while tensor cores multiply.

A step is a pair of tiles: each group of warps makes the scores of one, so that queries are read
from shared memory once for both, and half of the columns of all sums. Threads ask for half of the
next pair's bytes when this one's scores are there, and for the rest while the tensor cores multiply
values, and write them as float16, which holds them exactly, when the columns that they replace have
been multiplied. Probabilities take the place of the pair's last 64 columns. Queries are brought in
as they are, and converted in their place.

A pair is brought to the L2 cache one step before threads read it.

Sums fade only when some row's top has risen by much (`MOST`), as in FlashAttention-4: a weight may
be larger than one until then, and the factor of each row is applied at the end.

Shared memory holds, in KiB: queries 72, a widened pair of tiles 144.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from engine.attention.paged_mla.hopper_latents import (
    FIRST,
    PAIR,
    fetch,
    find_rows,
    read,
    widen,
)
from engine.attention.paged_mla.hopper_pieces import (
    COLUMNS,
    PART_INTS,
    QUARTERS,
    SHARED,
    SHARED_32,
    WIDE,
    WIDE_32,
    C,
    M,
    N,
    R,
    copy_rows,
    find_piece,
    find_slot,
    sum_up,
    synchronize,
)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16]))
_NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))

# Scores [64, 2, 64]: a group of warps has a tile.
_GROUPS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0], [0, 1, 0]],
        block_bases=[],
        shape=[64, 2, 64],
    )
)
# The same as [64, 2, 8, 4, 2]: what a thread holds of a row are the third and the last axis.
_THREADS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], [8, 0, 0, 0, 0],
                   [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]],
        lane_bases=[[0, 0, 0, 1, 0], [0, 0, 0, 2, 0],
                    [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0, 0], [32, 0, 0, 0, 0], [0, 1, 0, 0, 0]],
        block_bases=[],
        shape=[64, 2, 8, 4, 2],
    )
)  # fmt: skip
_WEIGHTS = gl.constexpr(gl.SliceLayout(2, gl.SliceLayout(4, _THREADS.value)))
# A number of each group, [64, 2], both of them in each thread that has scores of the row.
_BOTH = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]],
        block_bases=[],
        shape=[64, 2],
    )
)
_TOPS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
# What a warp says, [4, 2], all of it in each thread.
_ALL = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [2, 0]],
        lane_bases=[[0, 0], [0, 0], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0], [0, 0]],
        block_bases=[],
        shape=[4, 2],
    )
)
MOST = gl.constexpr(8.0)
"""Logarithm of the largest weight of a position, relative to a row's top when it was last moved."""


@gluon.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "cu_seqlens_q", "parts"],
)
def attend(
    latents, pitch, qc_desc, qr_desc, tables, seq_lens, cu_seqlens_q, parts,
    out, pieces, piece_logs,
    num_heads, scale, block_rows, table_width,
    BLOCK_TILES: gl.constexpr, ONE_QUERY: gl.constexpr,
):  # fmt: skip
    """Attend to latents in e4m3, rows of bytes `pitch` apart; see `hopper_kernel.attend`."""
    q_c = gl.allocate_shared_memory(gl.float16, [1, M, C], SHARED)
    q_r = gl.allocate_shared_memory(gl.float16, [1, M, R], SHARED)
    k_0 = gl.allocate_shared_memory(gl.float16, [1, PAIR, FIRST], SHARED)
    k_1 = gl.allocate_shared_memory(gl.float16, [1, PAIR, C - FIRST], SHARED)
    k_r = gl.allocate_shared_memory(gl.float16, [1, PAIR, R], SHARED)
    tops = gl.allocate_shared_memory(gl.float32, [M, 2], _TOPS)
    steps = gl.allocate_shared_memory(gl.float32, [4, 2], _TOPS)
    bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    hopper.fence_async_shared()
    synchronize()
    part, first_row = gl.program_id(1), gl.program_id(0) * M
    parts += part * PART_INTS
    first_seq, last_seq = gl.load(parts), gl.load(parts + 1)
    num_pieces = first_row * 0  # of which queries were brought in
    for index in range(last_seq - first_seq + 1):
        seq = first_seq + index
        first_query, prefix, num_rows, begin, num_tiles, stop, goes_on, is_cut = find_piece(
            seq, parts, seq_lens, cu_seqlens_q, num_heads, first_row, ONE_QUERY
        )
        table = tables + seq.to(gl.int64) * table_width
        row = first_query * num_heads + first_row
        rows = first_row + gl.arange(0, M, gl.SliceLayout(1, _SCORES))
        # Behind `stop` positions are another part's, or nobody's.
        visible = gl.minimum(prefix + rows // num_heads + 1, stop)
        sums_0 = gl.zeros([M, FIRST], gl.float32, _SUMS)
        sums_1 = gl.zeros([M, FIRST], gl.float32, _SUMS)
        weights = gl.zeros([M, 2, 4], gl.float32, _WEIGHTS)
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
        if num_tiles > 0:
            _bring_queries(qc_desc, qr_desc, bars.index(0), q_c, q_r, row)
            sums_0, sums_1, weights, top = _walk(
                sums_0, sums_1, weights, top, visible, scale, q_c, q_r, k_0, k_1, k_r, tops, steps,
                bars.index(0), num_pieces & 1, qc_desc.dtype, latents, pitch, table,
                begin, num_tiles, stop,
                gl.minimum(prefix + first_row // num_heads + 1, stop), block_rows, BLOCK_TILES,
            )  # fmt: skip
            num_pieces += 1
        place = find_slot(part, goes_on, first_row)
        _finish(sums_0, sums_1, weights, top, scale, k_0, k_1, num_rows, is_cut,
                out + row.to(gl.int64) * C, pieces + place * C, piece_logs + place)  # fmt: skip


@gluon.jit
def _convert_queries(x, dtype: gl.constexpr):
    """Return queries in float16, which has less range than bfloat16."""
    return gl.minimum(gl.maximum(x.to(gl.float32), -65504.0), 65504.0).to(dtype)


@gluon.jit
def _bring_queries(qc_desc, qr_desc, bar, q_c, q_r, row):
    """Have a tile of queries brought in; rows behind the sequence's are others', or zeros."""
    T: gl.constexpr = qc_desc.dtype
    mbarrier.expect(bar, M * (C + R) * 2)
    room_c, room_r = q_c._reinterpret(T, [M, C], SHARED), q_r._reinterpret(T, [M, R], SHARED)
    tma.async_copy_global_to_shared(qc_desc, [row, 0], bar, room_c)
    tma.async_copy_global_to_shared(qr_desc, [row, C], bar, room_r)


@gluon.jit
def _take_queries(bar, phase, T: gl.constexpr, q_c, q_r):
    """Wait for queries, and make float16 of them."""
    mbarrier.wait(bar, phase)
    if q_c.dtype != T:
        values_c = q_c._reinterpret(T, [M, C], SHARED).load(WIDE)
        values_r = q_r._reinterpret(T, [M, R], SHARED).load(_NARROW)
        q_c.index(0).store(_convert_queries(values_c, q_c.dtype))
        q_r.index(0).store(_convert_queries(values_r, q_r.dtype))


@gluon.jit
def _score_second(scores, q_c, q_r, k_1, k_r):
    """Begin to add the products of the second halves."""
    q = q_c.slice(FIRST, C - FIRST, dim=1)
    scores = hopper.warpgroup_mma(q, k_1.permute([1, 0]), scores, is_async=True)
    return hopper.warpgroup_mma(q_r, k_r.permute([1, 0]), scores, is_async=True)


@gluon.jit
def _compare(scores, first, visible, all_visible, top, tops, steps):
    """Return scores of what a row sees; write each group's largest, and how far a warp's rise."""
    if first + PAIR > all_visible:
        positions = first + gl.arange(0, PAIR, gl.SliceLayout(0, _SCORES))
        scores = gl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
    peaks = gl.max(scores.reshape([M, 2, N]), axis=2)
    tops.store(peaks)
    here = gl.convert_layout(
        top, gl.SliceLayout(1, gl.SliceLayout(2, _GROUPS)), assert_trivial=True
    )
    rise = gl.where(peaks == float("-inf"), peaks, peaks - here[:, None])
    steps.store(gl.max(rise.reshape([4, 16, 2]), axis=1))
    return scores


@gluon.jit
def _weigh(scores, top, weights, sums_0, sums_1, tops, steps, scale):
    """Return weights of a pair's positions, and running values.

    Rows' tops stay, and nothing fades, until one of them would rise by much.
    """
    rise = gl.max(gl.max(steps.load(_ALL), axis=1), axis=0)
    if rise * scale > MOST:
        peak = gl.max(tops.load(_BOTH), axis=1)
        peak = gl.convert_layout(peak, gl.SliceLayout(1, _SCORES), assert_trivial=True)
        peak = gl.maximum(top, peak)
        # A row that has seen nothing yet: -inf minus -inf would be NaN.
        shift = gl.where(peak == float("-inf"), 0.0, peak) * scale
        fade = gl.exp2(top * scale - shift)
        here = gl.convert_layout(
            fade, gl.SliceLayout(1, gl.SliceLayout(2, _WEIGHTS)), assert_trivial=True
        )
        weights = weights * here[:, None, None]
        sums_0, sums_1 = _faded(sums_0, fade), _faded(sums_1, fade)
        top = peak
    shift = gl.where(top == float("-inf"), 0.0, top) * scale
    shares = gl.exp2(scores * scale - shift[:, None])
    # A thread sums up what it holds: threads tell one another at the end.
    weights += gl.sum(gl.sum(shares.reshape([M, 2, 8, 4, 2]), axis=4), axis=2)
    return shares, top, weights, sums_0, sums_1


@gluon.jit
def _faded(sums, fade):
    """Return rows times a factor of each."""
    return sums * gl.convert_layout(fade, gl.SliceLayout(1, _SUMS))[:, None]


@gluon.jit
def _finish(
    sums_0, sums_1, weights, top, scale, k_0, k_1, num_rows, is_cut, out, piece, piece_logs
):  # fmt: skip
    """Write rows to the result, or, of a sequence that is cut, to its piece."""
    weight = gl.convert_layout(gl.sum(gl.sum(weights, axis=2), axis=1), gl.SliceLayout(1, _SCORES))
    factor, logs = sum_up(weight, top, scale)
    sums_0, sums_1 = _faded(sums_0, factor), _faded(sums_1, factor)
    if is_cut:
        rows = gl.arange(0, M, gl.SliceLayout(1, _SCORES))
        gl.store(piece_logs + rows, logs, mask=rows < num_rows)
        whole = k_0._reinterpret(gl.float32, [M, FIRST], SHARED_32)
        _write(sums_0, whole, num_rows, piece, WIDE_32)
        whole = k_1._reinterpret(gl.float32, [M, FIRST], SHARED_32)
        _write(sums_1, whole, num_rows, piece + FIRST, WIDE_32)
    else:
        T: gl.constexpr = out.dtype.element_ty
        room = k_0._reinterpret(T, [2, M, FIRST], SHARED).index(0)
        _write(sums_0, room, num_rows, out, WIDE)
        room = k_1._reinterpret(T, [2, M, FIRST], SHARED).index(0)
        _write(sums_1, room, num_rows, out + FIRST, WIDE)
    # The next piece's queries are brought to where this one's rows are.
    hopper.fence_async_shared()
    synchronize()


@gluon.jit
def _write(values, room, num_rows, target, LAYOUT: gl.constexpr):
    room.store(values.to(room.dtype))
    synchronize()
    for quarter in gl.static_range(QUARTERS // 2):
        some = room.slice(quarter * COLUMNS, COLUMNS, dim=1)
        copy_rows(some, num_rows, target + quarter * COLUMNS, LAYOUT)


@gluon.jit
def _walk(
    sums_0, sums_1, weights, top, visible, scale, q_c, q_r, k_0, k_1, k_r, tops, steps,
    bar, phase, T: gl.constexpr, latents, pitch, table, begin, num_tiles, stop, all_visible,
    block_rows, BLOCK_TILES: gl.constexpr,
):  # fmt: skip
    """Attend to a piece's tiles, of which there is at least one."""
    rows = find_rows(table, begin, num_tiles, block_rows, BLOCK_TILES)
    first = read(latents, pitch, rows, stop - begin * N, 0, FIRST)
    second = read(latents, pitch, rows, stop - begin * N, FIRST, C - FIRST)
    rotated = read(latents, pitch, rows, stop - begin * N, C, R)
    coming = find_rows(table, begin + 2, num_tiles - 2, block_rows, BLOCK_TILES)
    _take_queries(bar, phase, T, q_c, q_r)
    widen(first, k_0.index(0))
    hopper.fence_async_shared()
    synchronize()
    for pair in range((num_tiles + 1) // 2):
        tile = begin + 2 * pair
        left = stop - (tile + 2) * N
        # Always 0, which the compiler does not know: addresses of operands would fill registers.
        zero = pair >> 30
        # Nothing is being multiplied here: the compiler orders products across a loop's end.
        zeros = gl.zeros([M, PAIR], gl.float32, _SCORES)
        soon = hopper.warpgroup_mma(
            q_c.index(zero).slice(0, FIRST, dim=1), k_0.index(zero).permute([1, 0]), zeros,
            use_acc=False, is_async=True,
        )  # fmt: skip
        widen(second, k_1.index(zero))
        widen(rotated, k_r.index(zero))
        hopper.fence_async_shared()
        synchronize()
        soon = _score_second(
            soon, q_c.index(zero), q_r.index(zero), k_1.index(zero), k_r.index(zero)
        )
        scores = hopper.warpgroup_mma_wait(0, deps=(soon,))
        # Scores keep shared memory busy, and words come through the same door: it is free now.
        first = read(latents, pitch, coming, left, 0, FIRST)
        scores = _compare(scores, tile * N, visible, all_visible, top, tops, steps)
        synchronize()
        shares, top, weights, sums_0, sums_1 = _weigh(
            scores, top, weights, sums_0, sums_1, tops, steps, scale
        )
        # All warps have read the columns that weights replace.
        shared = k_r._reinterpret(gl.float16, [1, M, PAIR], SHARED).index(zero)
        shared.store(shares.to(gl.float16))
        hopper.fence_async_shared()
        synchronize()
        soon_0 = hopper.warpgroup_mma(shared, k_0.index(zero), sums_0, is_async=True)
        # A fence waits for what is under way, so here words are read, far before the next one.
        second = read(latents, pitch, coming, left, FIRST, C - FIRST)
        rotated = read(latents, pitch, coming, left, C, R)
        coming = find_rows(table, tile + 4, num_tiles - 2 * pair - 4, block_rows, BLOCK_TILES)
        soon_1 = hopper.warpgroup_mma(shared, k_1.index(zero), sums_1, is_async=True)
        fetch(latents, pitch, coming, num_tiles - 2 * pair - 4)
        sums_0 = hopper.warpgroup_mma_wait(1, deps=(soon_0,))
        synchronize()
        widen(first, k_0.index(zero))  # zeros behind the last tile, which nobody reads
        hopper.fence_async_shared()
        sums_1 = hopper.warpgroup_mma_wait(0, deps=(soon_1,))
        synchronize()
    return sums_0, sums_1, weights, top
