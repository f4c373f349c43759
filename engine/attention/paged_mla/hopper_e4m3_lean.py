"""Scores of the next tile beside weights of this one: the kernel for Hopper's tensor cores, latents in e4m3, widened while tensor cores multiply.

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
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
# Scores [64, 2, 32]: a group of warps has half of the positions.
_GROUPS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0], [0, 1, 0]],
        block_bases=[],
        shape=[64, 2, 32],
    )
)
# The same as [64, 2, 4, 4, 2]: what a thread holds of a row are the third and the last axis.
_THREADS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0]],
        lane_bases=[[0, 0, 0, 1, 0], [0, 0, 0, 2, 0],
                    [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0, 0], [32, 0, 0, 0, 0], [0, 1, 0, 0, 0]],
        block_bases=[],
        shape=[64, 2, 4, 4, 2],
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

_UNPACK = gl.constexpr(
    """{ .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high; }"""
)


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
    k_c = gl.allocate_shared_memory(gl.float16, [2, N, C], SHARED)
    k_r = gl.allocate_shared_memory(gl.float16, [2, N, R], SHARED)
    shared = gl.allocate_shared_memory(gl.float16, [M, N], SHARED)
    tops = gl.allocate_shared_memory(gl.float32, [M, 2], _TOPS)
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
            qc_desc, qr_desc, bars.index(0), num_pieces & 1, q_c.index(0), q_r.index(0), k_c, k_r, row, has_tiles
        )
        num_pieces += gl.where(has_tiles, 1, 0)
        rows = first_row + gl.arange(0, M, gl.SliceLayout(1, _SCORES))
        visible = prefix + rows // num_heads + 1
        sums = gl.zeros([M, C], gl.float32, _SUMS)
        weights = gl.zeros([M, 2, 4], gl.float32, _WEIGHTS)
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
        if num_tiles > 0:
            sums, weights, top = _walk(
                sums, weights, top, visible, scale, q_c, q_r, k_c, k_r, shared, tops,
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
def _compare(scores, first, visible, tops):
    """Return scores of what a row sees; write each group's largest ones."""
    positions = first + gl.arange(0, N, gl.SliceLayout(0, _SCORES))
    scores = gl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
    tops.store(gl.max(scores.reshape([M, 2, N // 2]), axis=2))
    return scores


@gluon.jit
def _weigh(scores, top, weights, tops, scale):
    """Return weights of a tile's positions, what earlier ones fade by, and both running values."""
    peak = gl.max(tops.load(_BOTH), axis=1)
    peak = gl.convert_layout(peak, gl.SliceLayout(1, _SCORES), assert_trivial=True)
    peak = gl.maximum(top, peak)
    # A row that has seen nothing yet: -inf minus -inf would be NaN.
    shift = gl.where(peak == float("-inf"), 0.0, peak) * scale
    shares = gl.exp2(scores * scale - shift[:, None])
    fade = gl.exp2(top * scale - shift)
    # A thread sums up what it holds: threads tell one another at the end.
    more = gl.sum(gl.sum(shares.reshape([M, 2, 4, 4, 2]), axis=4), axis=2)
    here = gl.convert_layout(
        fade, gl.SliceLayout(1, gl.SliceLayout(2, _WEIGHTS)), assert_trivial=True
    )
    return shares, fade, peak, weights * here[:, None, None] + more


@gluon.jit
def _faded(sums, fade):
    """Return rows times a factor of each."""
    return sums * gl.convert_layout(fade, gl.SliceLayout(1, _SUMS))[:, None]


@gluon.jit
def _finish(sums, weights, top, scale, room, num_rows, is_cut, out, piece, piece_logs):
    """Write rows to the result, or, of a sequence that is cut, to its piece."""
    weight = gl.convert_layout(
        gl.sum(gl.sum(weights, axis=2), axis=1), gl.SliceLayout(1, _SCORES)
    )
    factor, logs = sum_up(weight, top, scale)
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
    """Return columns of a tile, four to a word, zeros from row `num_kept` on."""
    # What lies behind the last position is anybody's, NaN too, and 0 times NaN is NaN.
    words = source.to(gl.pointer_type(gl.int32), bitcast=True)
    rows = gl.arange(0, N, gl.SliceLayout(1, _WORDS))[:, None]
    columns = first_column // 4 + gl.arange(0, WIDTH // 4, gl.SliceLayout(0, _WORDS))[None, :]
    return gl.load(words + rows * (pitch // 4) + columns, mask=rows < num_kept, other=0)


@gluon.jit
def _find_block(table, tile, is_there, BLOCK_TILES: gl.constexpr):
    return gl.load(table + tile // BLOCK_TILES, mask=is_there, other=0)


@gluon.jit
def _find_tile(latents, pitch, block, tile, block_rows, BLOCK_TILES: gl.constexpr):
    return latents + (block.to(gl.int64) * block_rows + tile % BLOCK_TILES * N) * pitch


@gluon.jit
def _widen(words, wide):
    """Write words of four e4m3 as float16, which holds them exactly."""
    low, high = gl.inline_asm_elementwise(
        _UNPACK, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    width: gl.constexpr = wide.shape[1] // 2
    pairs = wide._reinterpret(gl.int32, [N, width], SHARED_32)
    pairs.store(gl.join(low, high).reshape([N, width]))


@gluon.jit
def _start_values(shares, fade, sums, shared, k_c):
    """Begin to add a tile's values."""
    shared.store(shares.to(gl.float16))
    hopper.fence_async_shared()
    sums = _faded(sums, fade)
    synchronize()
    return hopper.warpgroup_mma(shared, k_c, sums, is_async=True)


@gluon.jit
def _walk(
    sums, weights, top, visible, scale, q_c, q_r, k_c, k_r, shared, tops,
    latents, pitch, table, begin, num_tiles, stop, block_rows, BLOCK_TILES: gl.constexpr,
):  # fmt: skip
    """Attend to a piece's tiles, of which there is at least one."""
    block = _find_block(table, begin, True, BLOCK_TILES)
    source = _find_tile(latents, pitch, block, begin, block_rows, BLOCK_TILES)
    block = _find_block(table, begin + 1, num_tiles > 1, BLOCK_TILES)
    words_c = _read(source, pitch, stop - begin * N, 0, C)
    words_r = _read(source, pitch, stop - begin * N, C, R)
    _widen(words_c, k_c.index(0))
    _widen(words_r, k_r.index(0))
    hopper.fence_async_shared()
    synchronize()
    soon = _start_scores(q_c.index(0), q_r.index(0), k_c.index(0), k_r.index(0))
    source = _find_tile(latents, pitch, block, begin + 1, block_rows, BLOCK_TILES)
    words_c = _read(source, pitch, stop - (begin + 1) * N, 0, C)
    words_r = _read(source, pitch, stop - (begin + 1) * N, C, R)
    block = _find_block(table, begin + 2, num_tiles > 2, BLOCK_TILES)
    scores = hopper.warpgroup_mma_wait(0, deps=(soon,))
    scores = _compare(scores, begin * N, visible, tops)
    synchronize()
    for count in range(num_tiles - 1):
        tile, slot, following = begin + count, count % 2, (count + 1) % 2
        shares, fade, top, weights = _weigh(scores, top, weights, tops, scale)
        sums_soon = _start_values(shares, fade, sums, shared, k_c.index(slot))
        following_block = _find_block(table, tile + 3, count + 3 < num_tiles, BLOCK_TILES)
        _widen(words_c, k_c.index(following))
        _widen(words_r, k_r.index(following))
        hopper.fence_async_shared()
        # Behind the fence, which waits for what is under way; the barrier keeps the compiler from
        # reading later.
        source = _find_tile(latents, pitch, block, tile + 2, block_rows, BLOCK_TILES)
        words_c = _read(source, pitch, stop - (tile + 2) * N, 0, C)
        words_r = _read(source, pitch, stop - (tile + 2) * N, C, R)
        block = following_block
        synchronize()
        zero = count >> 30
        soon = _start_scores(q_c.index(zero), q_r.index(zero), k_c.index(following), k_r.index(following))
        sums = hopper.warpgroup_mma_wait(2, deps=(sums_soon,))
        scores = hopper.warpgroup_mma_wait(0, deps=(soon,))
        scores = _compare(scores, (tile + 1) * N, visible, tops)
        synchronize()
    shares, fade, top, weights = _weigh(scores, top, weights, tops, scale)
    sums_soon = _start_values(shares, fade, sums, shared, k_c.index((num_tiles - 1) % 2))
    sums = hopper.warpgroup_mma_wait(0, deps=(sums_soon,))
    synchronize()
    return sums, weights, top
