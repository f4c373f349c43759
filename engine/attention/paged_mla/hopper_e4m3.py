"""The kernel for Hopper's tensor cores, latents in e4m3, widened while tensor cores multiply.

The copy engine would bring bytes into shared memory, which leaves room for one widened tile:
widening, scores and values would wait for one another. So threads read the next tile's bytes into
registers, before this one's probabilities are computed, and write them as float16, which holds them
exactly, to a second buffer while the tensor cores multiply this one's values. Probabilities take
the place of the tile's last 64 columns. Queries are brought in where latents will be, and widened
from there.

Shared memory holds, in KiB: queries 72, two widened tiles 144.
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

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
# Sixteen bytes a thread, eight rows a warp: neither reading nor writing do threads meet in a bank.
_BYTES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [8, 1], [1, 0]))


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
    q_c = gl.allocate_shared_memory(gl.float16, [M, C], SHARED)
    q_r = gl.allocate_shared_memory(gl.float16, [M, R], SHARED)
    k_c = gl.allocate_shared_memory(gl.float16, [2, N, C], SHARED)
    k_r = gl.allocate_shared_memory(gl.float16, [2, N, R], SHARED)
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
        has_tiles = num_tiles > 0
        _load_queries(
            qc_desc, qr_desc, bars.index(0), num_pieces & 1, q_c, q_r, k_c, k_r, row, has_tiles
        )
        num_pieces += gl.where(has_tiles, 1, 0)
        rows = first_row + gl.arange(0, M, gl.SliceLayout(1, _SCORES))
        visible = prefix + rows // num_heads + 1
        sums = gl.zeros([M, C], gl.float32, _SUMS)
        weights = gl.zeros([M, N], gl.float32, _SCORES)
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
        if num_tiles > 0:
            sums, weights, top = _walk(
                sums, weights, top, visible, scale, q_c, q_r, k_c, k_r,
                latents, pitch, table, begin, num_tiles, stop, block_rows, BLOCK_TILES,
            )  # fmt: skip
        place = find_slot(part, goes_on, first_row)
        _finish(sums, weights, top, scale, k_c, num_rows, is_cut,
                out + row.to(gl.int64) * C, pieces + place * C, piece_logs + place)  # fmt: skip


@gluon.jit
def _convert_queries(x, dtype: gl.constexpr):
    """Return queries in the type that is multiplied; float16 has less range than bfloat16."""
    if x.dtype == dtype:
        return x
    else:
        return gl.minimum(gl.maximum(x.to(gl.float32), -65504.0), 65504.0).to(dtype)


@gluon.jit
def _load_queries(qc_desc, qr_desc, bar, phase, q_c, q_r, k_c, k_r, row, pred):
    """Bring a tile of queries to where latents will be, and from there, as float16, to its place.

    Rows behind the sequence's are others', or zeros.
    """
    T: gl.constexpr = qc_desc.dtype
    mbarrier.expect(bar, M * (C + R) * 2, pred=pred)
    room = k_c.index(0)._reinterpret(T, [M, C], SHARED)
    tma.async_copy_global_to_shared(qc_desc, [row, 0], bar, room, pred=pred)
    room_r = k_r.index(0)._reinterpret(T, [M, R], SHARED)
    tma.async_copy_global_to_shared(qr_desc, [row, C], bar, room_r, pred=pred)
    mbarrier.wait(bar, phase, pred)
    for quarter in gl.static_range(QUARTERS):
        some = room.slice(quarter * COLUMNS, COLUMNS, dim=1).load(WIDE)
        q_c.slice(quarter * COLUMNS, COLUMNS, dim=1).store(_convert_queries(some, q_c.dtype))
    q_r.store(_convert_queries(room_r.load(_NARROW), q_c.dtype))
    hopper.fence_async_shared()
    synchronize()


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
def _finish(sums, weights, top, scale, room, num_rows, is_cut, out, piece, piece_logs):
    """Write rows to the result, or, of a sequence that is cut, to its piece."""
    factor, logs = sum_up(gl.sum(weights, axis=1), top, scale)
    values = _faded(sums, factor)
    if is_cut:
        rows = gl.arange(0, M, gl.SliceLayout(1, _SCORES))
        gl.store(piece_logs + rows, logs, mask=rows < num_rows)
        _write(room._reinterpret(gl.float32, [M, C], SHARED_32), values, num_rows, piece, WIDE_32)
    else:
        T: gl.constexpr = out.dtype.element_ty
        _write(room.index(0)._reinterpret(T, [M, C], SHARED), values, num_rows, out, WIDE)
    # The next piece's queries are brought to where this one's rows are.
    hopper.fence_async_shared()
    synchronize()


@gluon.jit
def _write(room, values, num_rows, target, LAYOUT: gl.constexpr):
    room.store(values.to(room.dtype))
    synchronize()
    for quarter in gl.static_range(QUARTERS):
        some = room.slice(quarter * COLUMNS, COLUMNS, dim=1)
        copy_rows(some, num_rows, target + quarter * COLUMNS, LAYOUT)


@gluon.jit
def _read(source, pitch, num_kept, first_column: gl.constexpr, WIDTH: gl.constexpr):
    """Return columns of a tile, zeros from row `num_kept` on."""
    # What lies behind the last position is anybody's, NaN too, and 0 times NaN is NaN.
    rows = gl.arange(0, N, gl.SliceLayout(1, _BYTES))[:, None]
    columns = first_column + gl.arange(0, WIDTH, gl.SliceLayout(0, _BYTES))[None, :]
    return gl.load(source + rows * pitch + columns, mask=rows < num_kept, other=0)


@gluon.jit
def _find_block(table, tile, is_there, BLOCK_TILES: gl.constexpr):
    return gl.load(table + tile // BLOCK_TILES, mask=is_there, other=0)


@gluon.jit
def _find_tile(latents, pitch, block, tile, block_rows, BLOCK_TILES: gl.constexpr):
    return latents + (block.to(gl.int64) * block_rows + tile % BLOCK_TILES * N) * pitch


@gluon.jit
def _widen(bits, wide):
    """Write bytes of e4m3 as float16, which holds them exactly."""
    wide.store(bits.to(gl.float8e4nv, bitcast=True).to(gl.float16))


@gluon.jit
def _walk(
    sums, weights, top, visible, scale, q_c, q_r, k_c, k_r,
    latents, pitch, table, begin, num_tiles, stop, block_rows, BLOCK_TILES: gl.constexpr,
):  # fmt: skip
    """Attend to a piece's tiles, of which there is at least one."""
    block = _find_block(table, begin, True, BLOCK_TILES)
    source = _find_tile(latents, pitch, block, begin, block_rows, BLOCK_TILES)
    _widen(_read(source, pitch, stop - begin * N, 0, C), k_c.index(0))
    _widen(_read(source, pitch, stop - begin * N, C, R), k_r.index(0))
    hopper.fence_async_shared()
    synchronize()
    block = _find_block(table, begin + 1, num_tiles > 1, BLOCK_TILES)
    for count in range(num_tiles):
        tile, slot, following = begin + count, count % 2, (count + 1) % 2
        scores_soon = _start_scores(q_c, q_r, k_c.index(slot), k_r.index(slot))
        # Bytes arrive while scores are made: the fence below would wait for what is under way. The
        # barrier keeps the compiler from reading later.
        source = _find_tile(latents, pitch, block, tile + 1, block_rows, BLOCK_TILES)
        bits_c = _read(source, pitch, stop - (tile + 1) * N, 0, C)
        bits_r = _read(source, pitch, stop - (tile + 1) * N, C, R)
        block = _find_block(table, tile + 2, count + 2 < num_tiles, BLOCK_TILES)
        synchronize()
        scores = hopper.warpgroup_mma_wait(0, deps=(scores_soon,))
        shares, fade, top, weights = _weigh(scores, tile * N, visible, top, weights, scale)
        synchronize()  # all warps have read the columns that weights replace
        k_r.index(slot).store(shares.to(gl.float16))
        hopper.fence_async_shared()
        sums = _faded(sums, fade)
        synchronize()
        sums_soon = hopper.warpgroup_mma(k_r.index(slot), k_c.index(slot), sums, is_async=True)
        # Zeros behind the last tile, which nobody reads.
        _widen(bits_c, k_c.index(following))
        _widen(bits_r, k_r.index(following))
        hopper.fence_async_shared()
        sums = hopper.warpgroup_mma_wait(0, deps=(sums_soon,))
        synchronize()
    return sums, weights, top
