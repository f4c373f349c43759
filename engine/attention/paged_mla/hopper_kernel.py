"""The same attention for Hopper's tensor cores, in Gluon: what runs beside what is written out.

`kernel` leaves it to Triton's compiler how tiles lie in registers and when loads begin; with 64
rows on eight warps it computes the scores twice, and waits for memory. Here a step is a pair of
tiles of 64 latents, and each group of four warps makes the scores of one of them: that reads as
much of shared memory as is multiplied meanwhile, where half of the scores of one tile would wait
for it. Groups exchange probabilities by shared memory, in the place of the last 64 columns, which
nobody needs any more, and each holds half of the sums.

The copy engine brings latents by quarters of their 512 columns. Values are multiplied by quarters,
too: a quarter's buffer is given back while the others are multiplied, and the next scores begin
with the quarter that came first. Latents in e4m3 are for `hopper_e4m3`.

Shared memory holds, in KiB: queries 72, a pair of tiles 144. One program runs on an SM.

For 512 + 64 numbers and blocks of whole tiles. Work and results are those of `kernel.attend`.
Compiled by Triton; imported only where that is installed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

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

PAIR = gl.constexpr(128)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
# What is left of scores [64, 2, 64] when their last axis is summed up: a number for each group.
_GROUPS = gl.constexpr(
    gl.SliceLayout(
        2,
        gl.DistributedLinearLayout(
            reg_bases=[[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
            lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            warp_bases=[[16, 0, 0], [32, 0, 0], [0, 1, 0]],
            block_bases=[],
            shape=[64, 2, 64],
        ),
    )
)


@gluon.jit
def _start_queries(qc_desc, qr_desc, bar, q_c, q_r, row, pred):
    """Have a tile of queries brought in; rows behind the sequence's are others', or zeros."""
    mbarrier.expect(bar, M * (C + R) * 2, pred=pred)
    for quarter in gl.static_range(QUARTERS):
        tma.async_copy_global_to_shared(
            qc_desc, [row, quarter * COLUMNS], bar, q_c.index(quarter), pred=pred
        )
    tma.async_copy_global_to_shared(qr_desc, [row, C], bar, q_r.index(0), pred=pred)


@gluon.jit
def _find_rows(table, tile, last_tile, block_rows, BLOCK_TILES: gl.constexpr):
    """Return where a pair of tiles begins; of one that is not there, the last one's place."""
    second = gl.minimum(tile + 1, last_tile)
    tile = gl.minimum(tile, last_tile)
    first_row = gl.load(table + tile // BLOCK_TILES) * block_rows + tile % BLOCK_TILES * N
    second_row = gl.load(table + second // BLOCK_TILES) * block_rows + second % BLOCK_TILES * N
    return first_row, second_row


@gluon.jit
def _bring(desc, bar, target, first_row, second_row, column: gl.constexpr, pred):
    """Have the same columns of two tiles brought in, one below the other."""
    tma.async_copy_global_to_shared(
        desc, [first_row, column], bar, target.slice(0, N, dim=0), pred=pred
    )
    tma.async_copy_global_to_shared(
        desc, [second_row, column], bar, target.slice(N, N, dim=0), pred=pred
    )


@gluon.jit
def _start_quarter(quarter: gl.constexpr, c_desc, r_desc, bars, k_c, k_r, rows, pred):
    """Have a quarter of a pair's columns brought in; with the last one come the rotated ones."""
    first_row, second_row = rows
    bar = bars.index(quarter)
    if quarter == QUARTERS - 1:
        mbarrier.expect(bar, PAIR * (COLUMNS + R) * 2, pred=pred)
        _bring(r_desc, bar, k_r.index(0), first_row, second_row, C, pred)
    else:
        mbarrier.expect(bar, PAIR * COLUMNS * 2, pred=pred)
    _bring(c_desc, bar, k_c.index(quarter), first_row, second_row, quarter * COLUMNS, pred)


@gluon.jit
def _clear_rows(k, num_kept):
    """Zero the rows of a pair from `num_kept` on, if there are any, sixteen at a time."""
    for group in gl.static_range(PAIR // 16):
        if num_kept < group * 16 + 16:
            some = k.slice(group * 16, 16, dim=0)
            rows = group * 16 + gl.arange(0, 16, gl.SliceLayout(1, WIDE))
            values = some.load(WIDE)
            some.store(gl.where((rows < num_kept)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _weigh(scores, top, weights, scale):
    """Return weights of a pair's positions, what earlier ones fade by, and both running values."""
    peak = gl.maximum(top, gl.max(scores, axis=1))
    # A row that has seen nothing yet: -inf minus -inf would be NaN.
    shift = gl.where(peak == float("-inf"), 0.0, peak) * scale
    shares = gl.exp2(scores * scale - shift[:, None])
    fade = gl.exp2(top * scale - shift)
    # Each group of warps has a sum of its own: they tell one another at the end.
    more = gl.sum(shares.reshape([M, 2, N]), axis=2)
    fade_2 = gl.convert_layout(fade, gl.SliceLayout(1, _GROUPS), assert_trivial=True)
    return shares, fade, peak, weights * fade_2[:, None] + more


@gluon.jit
def _score(q_c, q_r, k_c, k_r, bars, phase, zero):
    """Begin to multiply queries and a pair of tiles, as they come: [M, PAIR]."""
    scores = gl.zeros([M, PAIR], gl.float32, _SCORES)
    for quarter in gl.static_range(QUARTERS):
        mbarrier.wait(bars.index(quarter), phase, True)
        if quarter == 0:
            synchronize()
        scores = hopper.warpgroup_mma(
            q_c.index(zero + quarter),
            k_c.index(zero + quarter).permute([1, 0]),
            scores,
            use_acc=quarter > 0,
            is_async=True,
        )
    return hopper.warpgroup_mma(
        q_r.index(zero), k_r.index(zero).permute([1, 0]), scores, is_async=True
    )


@gluon.jit
def _faded(sums, fade):
    """Return rows times a factor of each."""
    return sums * gl.convert_layout(fade, gl.SliceLayout(1, _SUMS))[:, None]


@gluon.jit
def _write(quarter: gl.constexpr, sums, factor, room, num_rows, is_cut, out, piece):
    """Write a quarter of the rows to the result, or, of a sequence that is cut, to its piece."""
    sums = _faded(sums, factor)
    if is_cut:
        wide = room.index(quarter)._reinterpret(gl.float32, [M, COLUMNS], SHARED_32)
        _put(wide, sums, num_rows, piece + quarter * COLUMNS, WIDE_32)
    else:
        some = room.index(quarter).slice(0, M, dim=0)
        _put(some, sums, num_rows, out + quarter * COLUMNS, WIDE)


@gluon.jit
def _put(room, values, num_rows, target, LAYOUT: gl.constexpr):
    room.store(values.to(room.dtype))
    synchronize()
    copy_rows(room, num_rows, target, LAYOUT)


@gluon.jit
def _finish(sums, weights, top, scale, room, num_rows, is_cut, out, piece, piece_logs):
    """Write what was summed up."""
    weight = gl.convert_layout(gl.sum(weights, axis=1), gl.SliceLayout(1, _SCORES))
    factor, logs = sum_up(weight, top, scale)
    if is_cut:
        rows = gl.arange(0, M, gl.SliceLayout(1, _SCORES))
        gl.store(piece_logs + rows, logs, mask=rows < num_rows)
    _write(0, sums[0], factor, room, num_rows, is_cut, out, piece)
    _write(1, sums[1], factor, room, num_rows, is_cut, out, piece)
    _write(2, sums[2], factor, room, num_rows, is_cut, out, piece)
    _write(3, sums[3], factor, room, num_rows, is_cut, out, piece)
    # The next piece's latents are brought to where this one's rows are.
    hopper.fence_async_shared()
    synchronize()


@gluon.jit
def _make_barriers():
    """Return the barriers of the quarters, and of the queries."""
    bars = gl.allocate_shared_memory(gl.int64, [QUARTERS + 1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(QUARTERS + 1):
        mbarrier.init(bars.index(slot), count=1)
    hopper.fence_async_shared()
    synchronize()
    return bars


@gluon.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "cu_seqlens_q", "parts"],
)
def attend(
    c_desc, r_desc, qc_desc, qr_desc, tables, seq_lens, cu_seqlens_q, parts,
    out, pieces, piece_logs,
    num_heads, scale, block_rows, table_width,
    BLOCK_TILES: gl.constexpr, ONE_QUERY: gl.constexpr,
):  # fmt: skip
    """Attend to latents in the type of the queries; grid: tiles of rows, parts.

    `c_desc` and `r_desc` describe a layer as rows of 576, blocks `block_rows` apart, of which they
    bring [64, 128] and [64, 64], `qc_desc` and `qr_desc` likewise the queries; a block has
    BLOCK_TILES times 64 rows. The rest as for `kernel.attend`.
    """
    T: gl.constexpr = out.dtype.element_ty
    q_c = gl.allocate_shared_memory(T, [QUARTERS, M, COLUMNS], SHARED)
    q_r = gl.allocate_shared_memory(T, [1, M, R], SHARED)
    k_c = gl.allocate_shared_memory(T, [QUARTERS, PAIR, COLUMNS], SHARED)
    k_r = gl.allocate_shared_memory(T, [1, PAIR, R], SHARED)
    bars = _make_barriers()
    part, first_row = gl.program_id(1), gl.program_id(0) * M
    parts += part * PART_INTS
    first_seq, last_seq = gl.load(parts), gl.load(parts + 1)
    count = first_row * 0  # of pairs that were brought in
    num_pieces = first_row * 0  # of which queries were brought in
    for index in range(last_seq - first_seq + 1):
        seq = first_seq + index
        first_query, prefix, num_rows, begin, num_tiles, stop, goes_on, is_cut = find_piece(
            seq, parts, seq_lens, cu_seqlens_q, num_heads, first_row, ONE_QUERY
        )
        table = tables + seq.to(gl.int64) * table_width
        last_tile = begin + gl.maximum(num_tiles, 1) - 1
        has_tiles = num_tiles > 0
        row = first_query * num_heads + first_row
        _start_queries(qc_desc, qr_desc, bars.index(QUARTERS), q_c, q_r, row, has_tiles)
        coming = _find_rows(table, begin, last_tile, block_rows, BLOCK_TILES)
        for quarter in gl.static_range(QUARTERS):
            _start_quarter(quarter, c_desc, r_desc, bars, k_c, k_r, coming, has_tiles)
        mbarrier.wait(bars.index(QUARTERS), num_pieces & 1, has_tiles)
        sums, weights, top = _walk(
            first_row, num_heads, prefix, scale, q_c, q_r, k_c, k_r, bars, c_desc, r_desc,
            table, begin, last_tile, num_tiles, stop, count, block_rows, BLOCK_TILES,
        )  # fmt: skip
        count += (num_tiles + 1) // 2
        num_pieces += gl.where(has_tiles, 1, 0)
        place = find_slot(part, goes_on, first_row)
        _finish(sums, weights, top, scale, k_c, num_rows, is_cut,
                out + row.to(gl.int64) * C, pieces + place * C, piece_logs + place)  # fmt: skip


@gluon.jit
def _walk(
    first_row, num_heads, prefix, scale, q_c, q_r, k_c, k_r, bars, c_desc, r_desc,
    table, begin, last_tile, num_tiles, stop, count, block_rows, BLOCK_TILES: gl.constexpr,
):  # fmt: skip
    """Attend to a piece's tiles, of which the first pair is on its way."""
    T: gl.constexpr = q_c.dtype
    rows = first_row + gl.arange(0, M, gl.SliceLayout(1, _SCORES))
    # Behind `stop` positions are another part's, or nobody's.
    visible = gl.minimum(prefix + rows // num_heads + 1, stop)
    all_visible = gl.minimum(prefix + first_row // num_heads + 1, stop)
    sums_0 = gl.zeros([M, COLUMNS], gl.float32, _SUMS)
    sums_1 = gl.zeros([M, COLUMNS], gl.float32, _SUMS)
    sums_2 = gl.zeros([M, COLUMNS], gl.float32, _SUMS)
    sums_3 = gl.zeros([M, COLUMNS], gl.float32, _SUMS)
    weights = gl.zeros([M, 2], gl.float32, _GROUPS)
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
    num_pairs = (num_tiles + 1) // 2
    for pair in range(num_pairs):
        position = (begin + 2 * pair) * N
        # Always 0, which the compiler does not know: it would keep the addresses of all
        # operands in registers, of which there are not enough.
        zero = pair >> 30
        scores = _score(q_c, q_r, k_c, k_r, bars, (count + pair) & 1, zero)
        coming = _find_rows(table, begin + 2 * pair + 2, last_tile, block_rows, BLOCK_TILES)
        scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
        if position + PAIR > all_visible:
            positions = position + gl.arange(0, PAIR, gl.SliceLayout(0, _SCORES))
            scores = gl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
        shares, fade, top, weights = _weigh(scores, top, weights, scale)
        synchronize()  # all warps have read the columns that weights replace
        shared_weights = k_r._reinterpret(T, [1, M, PAIR], SHARED).index(zero)
        shared_weights.store(shares.to(T))
        has_next = pair + 1 < num_pairs
        if position + PAIR > stop:
            # What lies behind the last position is anybody's, NaN too, and 0 times NaN is NaN.
            # (Scores of such rows are masked, whatever they are.)
            for quarter in gl.static_range(QUARTERS):
                _clear_rows(k_c.index(quarter), stop - position)
        hopper.fence_async_shared()
        sums_0, sums_1 = _faded(sums_0, fade), _faded(sums_1, fade)
        sums_2, sums_3 = _faded(sums_2, fade), _faded(sums_3, fade)
        synchronize()
        soon_0 = _start_values(shared_weights, k_c.index(zero), sums_0)
        soon_1 = _start_values(shared_weights, k_c.index(zero + 1), sums_1)
        soon_2 = _start_values(shared_weights, k_c.index(zero + 2), sums_2)
        soon_3 = _start_values(shared_weights, k_c.index(zero + 3), sums_3)
        sums_0 = hopper.warpgroup_mma_wait(3, deps=(soon_0,))
        synchronize()
        _start_quarter(0, c_desc, r_desc, bars, k_c, k_r, coming, has_next)
        sums_1 = hopper.warpgroup_mma_wait(2, deps=(soon_1,))
        synchronize()
        _start_quarter(1, c_desc, r_desc, bars, k_c, k_r, coming, has_next)
        sums_2 = hopper.warpgroup_mma_wait(1, deps=(soon_2,))
        synchronize()
        _start_quarter(2, c_desc, r_desc, bars, k_c, k_r, coming, has_next)
        sums_3 = hopper.warpgroup_mma_wait(0, deps=(soon_3,))
        synchronize()
        _start_quarter(3, c_desc, r_desc, bars, k_c, k_r, coming, has_next)
    return (sums_0, sums_1, sums_2, sums_3), weights, top


@gluon.jit
def _start_values(shared_weights, values, sums):
    return hopper.warpgroup_mma(shared_weights, values, sums, is_async=True)
