"""The same attention for Hopper's tensor cores, in Gluon: what runs beside what is written out.

`kernel` leaves it to Triton's compiler how tiles lie in registers and when loads begin; with 64
rows on eight warps it computes the scores twice, and waits for memory. Here both groups of four
warps make half of the scores each, exchange probabilities by shared memory, and hold half of the
sums, [64, 256]. The copy engine brings two tiles of 64 latents in; a tile's buffer is given back
as soon as its values are multiplied. In bfloat16 the next tile's scores follow in the tensor cores
behind this tile's values, so that they work while the copy engine and the others do. Latents in
e4m3 are for `hopper_e4m3`.

Shared memory holds, in KiB: queries 72, two tiles 144, probabilities 8. That is all of it, so one
program runs on a multiprocessor.

For 512 + 64 numbers and blocks of whole tiles. Work and results are those of `kernel.attend`.
Compiled by Triton; imported only where that is installed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

M = gl.constexpr(64)
N = gl.constexpr(64)
C = gl.constexpr(512)
R = gl.constexpr(64)
PART_INTS = gl.constexpr(8)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
# Eight numbers of 16 bits a thread.
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 2], [1, 0]))
_NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))

_synchronize = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed with Triton 3.7
"""Of all threads of a program."""


@gluon.jit
def _find_piece(
    seq, parts, seq_lens, cu_seqlens_q, num_heads, first_row, ONE_QUERY: gl.constexpr
):  # fmt: skip
    """Return what of a sequence this program attends to, and with which rows.

    The sequence's first query, the positions before its first query, rows of this tile, the first
    tile of positions, how many there are, the last position's end, whether the sequence goes on
    from an earlier part, and whether it is in several parts.
    """
    length = gl.load(seq_lens + seq)
    first_query = seq
    num_queries = length * 0 + 1
    if not ONE_QUERY:
        first_query = gl.load(cu_seqlens_q + seq)
        num_queries = gl.load(cu_seqlens_q + seq + 1) - first_query
    num_pages = gl.maximum((length + N - 1) // N, 1)
    begin = gl.where(seq == gl.load(parts), gl.load(parts + 2), 0)
    end = gl.where(seq == gl.load(parts + 1), gl.load(parts + 3), num_pages)
    num_rows = gl.minimum(num_queries * num_heads - first_row, M)
    prefix = length - num_queries
    # A row sees the positions up to its own query's: none beyond the last row's is needed.
    last_row = gl.maximum(first_row + num_rows - 1, 0)
    stop = gl.minimum(end * N, prefix + last_row // num_heads + 1)
    stop = gl.where(num_rows > 0, stop, 0)
    num_tiles = gl.maximum(stop - begin * N + N - 1, 0) // N
    is_cut = (begin > 0) | (end < num_pages)
    return first_query, prefix, num_rows, begin, num_tiles, stop, begin > 0, is_cut


@gluon.jit
def _start_load(c_desc, r_desc, bars, k_c, k_r, table, tile, count, block_rows, pred,
                BLOCK_TILES: gl.constexpr, BYTES: gl.constexpr):  # fmt: skip
    """Have a tile of latents brought into the buffer of the `count`-th, if `pred`."""
    slot = count % 2
    block = gl.load(table + tile // BLOCK_TILES, mask=pred, other=0)
    row = block * block_rows + tile % BLOCK_TILES * N
    mbarrier.expect(bars.index(slot), BYTES, pred=pred)
    tma.async_copy_global_to_shared(c_desc, [row, 0], bars.index(slot), k_c.index(slot), pred=pred)
    tma.async_copy_global_to_shared(r_desc, [row, C], bars.index(slot), k_r.index(slot), pred=pred)


@gluon.jit
def _wait_for_load(bars, count, pred):
    mbarrier.wait(bars.index(count % 2), (count // 2) & 1, pred=pred)


@gluon.jit
def _convert_queries(x, dtype: gl.constexpr):
    """Return queries in the type that is multiplied; float16 has less range than bfloat16."""
    if x.dtype == dtype:
        return x
    else:
        return gl.minimum(gl.maximum(x.to(gl.float32), -65504.0), 65504.0).to(dtype)


@gluon.jit
def _load_queries(source, num_rows, q_c, q_r):
    """Put a tile of queries into shared memory, zeros where there is no row."""
    rows = gl.arange(0, M, gl.SliceLayout(1, _WIDE))[:, None]
    columns = gl.arange(0, C, gl.SliceLayout(0, _WIDE))[None, :]
    values = gl.load(source + rows * (C + R) + columns, mask=rows < num_rows, other=0.0)
    q_c.store(_convert_queries(values, q_c.dtype))
    rows = gl.arange(0, M, gl.SliceLayout(1, _NARROW))[:, None]
    columns = gl.arange(0, R, gl.SliceLayout(0, _NARROW))[None, :]
    values = gl.load(source + C + rows * (C + R) + columns, mask=rows < num_rows, other=0.0)
    q_r.store(_convert_queries(values, q_r.dtype))
    hopper.fence_async_shared()


@gluon.jit
def _clear_rows(k, num_kept, layout: gl.constexpr):
    """Zero the rows of a tile from `num_kept` on, if there are any, eight at a time."""
    for group in gl.static_range(N // 8):
        if num_kept < group * 8 + 8:
            some = k.slice(group * 8, 8, dim=0)
            rows = group * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout))
            values = some.load(layout)
            some.store(gl.where((rows < num_kept)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _start_scores(q_c, q_r, k_c, k_r):
    """Begin to multiply queries and a tile of latents: [M, N], in two steps of the tensor cores."""
    zeros = gl.zeros([M, N], gl.float32, _SCORES)
    scores = hopper.warpgroup_mma(q_r, k_r.permute([1, 0]), zeros, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(q_c, k_c.permute([1, 0]), scores, is_async=True)


@gluon.jit
def _weigh(scores, first, visible, top, weights, scale):
    """Return weights of a tile's positions, what earlier ones fade by, and both running values."""
    positions = first + gl.arange(0, N, gl.SliceLayout(0, _SCORES))
    scores = gl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
    peak = gl.maximum(top, gl.max(scores, axis=1))
    # A row that has seen nothing yet: -inf minus -inf would be NaN.
    shift = gl.where(peak == float("-inf"), 0.0, peak) * scale
    shares = gl.exp2(scores * scale - shift[:, None])
    fade = gl.exp2(top * scale - shift)
    # Summed up over positions once, at the end: before, warps need not tell one another.
    return shares, fade, peak, weights * fade[:, None] + shares


@gluon.jit
def _faded(sums, fade):
    """Return rows times a factor of each."""
    return sums * gl.convert_layout(fade, gl.SliceLayout(1, _SUMS))[:, None]


@gluon.jit
def _finish(sums, weights, top, scale, num_rows, is_cut, out, piece, piece_logs):
    """Write rows to the result, or, of a sequence that is cut, to its piece."""
    weight = gl.sum(weights, axis=1)
    saw_nothing = weight == 0.0
    weight = gl.where(saw_nothing, 1.0, weight)
    logs = gl.where(saw_nothing, float("-inf"), top * scale + gl.log2(weight))
    values = _faded(sums, 1.0 / weight)
    rows = gl.arange(0, M, gl.SliceLayout(1, _SUMS))[:, None]
    place = rows * C + gl.arange(0, C, gl.SliceLayout(0, _SUMS))[None, :]
    if is_cut:
        gl.store(piece + place, values, mask=rows < num_rows)
        log_rows = gl.arange(0, M, gl.SliceLayout(1, _SCORES))
        gl.store(piece_logs + log_rows, logs, mask=log_rows < num_rows)
    else:
        gl.store(out + place, values.to(out.dtype.element_ty), mask=rows < num_rows)


@gluon.jit
def _make_barriers():
    """Return the barriers of both buffers."""
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(bars.index(slot), count=1)
    hopper.fence_async_shared()
    _synchronize()
    return bars


@gluon.jit
def _find_slot(part, goes_on, first_row):
    """Return the row of a sequence's piece: of a part, it is the first or the second."""
    slot = 2 * part + gl.where(goes_on, 0, 1)
    return slot.to(gl.int64) * gl.num_programs(0) * M + first_row


@gluon.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "cu_seqlens_q", "parts"],
)
def attend(
    c_desc, r_desc, q, tables, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs,
    num_heads, scale, block_rows, table_width,
    BLOCK_TILES: gl.constexpr, ONE_QUERY: gl.constexpr,
):  # fmt: skip
    """Attend to latents in the type of the queries; grid: tiles of rows, parts.

    `c_desc` and `r_desc` describe a layer as rows of 576, blocks `block_rows` apart, of which they
    bring [64, 512] and [64, 64]; a block has BLOCK_TILES times 64 rows. The rest as for
    `kernel.attend`.
    """
    T: gl.constexpr = q.dtype.element_ty
    q_c = gl.allocate_shared_memory(T, [M, C], _SHARED)
    q_r = gl.allocate_shared_memory(T, [M, R], _SHARED)
    k_c = gl.allocate_shared_memory(T, [2, N, C], _SHARED)
    k_r = gl.allocate_shared_memory(T, [2, N, R], _SHARED)
    shared_weights = gl.allocate_shared_memory(T, [M, N], _SHARED)
    bars = _make_barriers()
    part, first_row = gl.program_id(1), gl.program_id(0) * M
    parts += part * PART_INTS
    first_seq, last_seq = gl.load(parts), gl.load(parts + 1)
    count = first_row * 0  # of tiles that were brought in
    for index in range(last_seq - first_seq + 1):
        seq = first_seq + index
        first_query, prefix, num_rows, begin, num_tiles, stop, goes_on, is_cut = _find_piece(
            seq, parts, seq_lens, cu_seqlens_q, num_heads, first_row, ONE_QUERY
        )
        table = tables + seq.to(gl.int64) * table_width
        for ahead in gl.static_range(2):
            _start_load(c_desc, r_desc, bars, k_c, k_r, table, begin + ahead, count + ahead,
                        block_rows, ahead < num_tiles, BLOCK_TILES, N * (C + R) * 2)  # fmt: skip
        row = first_query.to(gl.int64) * num_heads + first_row
        _load_queries(q + row * (C + R), num_rows, q_c, q_r)
        rows = first_row + gl.arange(0, M, gl.SliceLayout(1, _SCORES))
        visible = prefix + rows // num_heads + 1
        sums = gl.zeros([M, C], gl.float32, _SUMS)
        weights = gl.zeros([M, N], gl.float32, _SCORES)
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
        sums, weights, top = _walk(
            sums, weights, top, visible, scale, q_c, q_r, k_c, k_r, shared_weights, bars,
            c_desc, r_desc, table, begin, num_tiles, stop, count, block_rows, BLOCK_TILES,
        )  # fmt: skip
        count += num_tiles
        place = _find_slot(part, goes_on, first_row)
        _finish(sums, weights, top, scale, num_rows, is_cut, out + row * C, pieces + place * C,
                piece_logs + place)  # fmt: skip


@gluon.jit
def _walk(
    sums, weights, top, visible, scale, q_c, q_r, k_c, k_r, shared_weights, bars,
    c_desc, r_desc, table, begin, num_tiles, stop, count, block_rows, BLOCK_TILES: gl.constexpr,
):  # fmt: skip
    """Attend to a piece's tiles, of which the first two are on their way."""
    T: gl.constexpr = q_c.dtype
    _wait_for_load(bars, count, num_tiles > 0)
    _synchronize()
    scores = _start_scores(q_c, q_r, k_c.index(count % 2), k_r.index(count % 2))
    scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
    for tile in range(num_tiles - 1):
        slot, following = (count + tile) % 2, (count + tile + 1) % 2
        shares, fade, top, weights = _weigh(
            scores, (begin + tile) * N, visible, top, weights, scale
        )
        shared_weights.store(shares.to(T))
        hopper.fence_async_shared()
        sums = _faded(sums, fade)
        _synchronize()
        sums_soon = hopper.warpgroup_mma(shared_weights, k_c.index(slot), sums, is_async=True)
        _wait_for_load(bars, count + tile + 1, True)
        scores_soon = _start_scores(q_c, q_r, k_c.index(following), k_r.index(following))
        # The scores' two steps may be under way still; all warps are done with the values.
        sums = hopper.warpgroup_mma_wait(2, deps=(sums_soon,))
        _synchronize()
        _start_load(c_desc, r_desc, bars, k_c, k_r, table, begin + tile + 2, count + tile + 2,
                    block_rows, tile + 2 < num_tiles, BLOCK_TILES, N * (C + R) * 2)  # fmt: skip
        scores = hopper.warpgroup_mma_wait(0, deps=(scores_soon,))
    last = gl.maximum(num_tiles - 1, 0)
    shares, fade, top, weights = _weigh(scores, (begin + last) * N, visible, top, weights, scale)
    shared_weights.store(shares.to(T))
    values = k_c.index((count + last) % 2)
    # What lies behind the last position is anybody's, NaN too, and 0 times NaN is NaN. (Scores of
    # such rows are masked, whatever they are.)
    _clear_rows(values, stop - (begin + last) * N, _WIDE)
    hopper.fence_async_shared()
    _synchronize()
    sums = hopper.warpgroup_mma(shared_weights, values, _faded(sums, fade), is_async=True)
    sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
    _synchronize()
    return sums, gl.where(num_tiles > 0, weights, 0.0), top
