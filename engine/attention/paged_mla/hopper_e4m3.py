"""The kernel for Hopper's tensor cores, with latents in e4m3: they are widened on the way.

Tiles come in as bytes, two at a time, and are written as float16, which holds them exactly, to a
third buffer that both products read. So these wait for one another: there is no room for a second
one.

Shared memory holds, in KiB: queries 72, two tiles in e4m3 72, one widened 72, probabilities 8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from engine.attention.paged_mla.hopper_kernel import (
    _SCORES,
    _SHARED,
    _SUMS,
    PART_INTS,
    C,
    M,
    N,
    R,
    _clear_rows,
    _faded,
    _find_piece,
    _find_slot,
    _finish,
    _load_queries,
    _make_barriers,
    _start_load,
    _start_scores,
    _synchronize,
    _wait_for_load,
    _weigh,
)

_BYTES_C = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=2))
_BYTES_R = gl.constexpr(gl.NVMMASharedLayout(64, 8, rank=2))
# Sixteen bytes a thread.
_WIDE = gl.constexpr(gl.BlockedLayout([1, 16], [2, 16], [8, 1], [1, 0]))
_NARROW = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [8, 1], [1, 0]))


@gluon.jit
def _widen(narrow, wide, layout: gl.constexpr, WIDTH: gl.constexpr):
    """Write a tile in e4m3 as float16, WIDTH columns at a time."""
    for part in gl.static_range(wide.shape[1] // WIDTH):
        bits = narrow.slice(part * WIDTH, WIDTH, dim=1).load(layout)
        values = bits.to(gl.float8e4nv, bitcast=True).to(gl.float16)
        wide.slice(part * WIDTH, WIDTH, dim=1).store(values)


@gluon.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "cu_seqlens_q", "parts"],
)
def attend(
    c_desc, r_desc, q, tables, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs,
    num_heads, scale, block_rows, table_width,
    BLOCK_TILES: gl.constexpr, ONE_QUERY: gl.constexpr,
):  # fmt: skip
    """Attend to latents in e4m3, described as bytes; see `hopper_kernel.attend`."""
    q_c = gl.allocate_shared_memory(gl.float16, [M, C], _SHARED)
    q_r = gl.allocate_shared_memory(gl.float16, [M, R], _SHARED)
    bytes_c = gl.allocate_shared_memory(gl.uint8, [2, N, C], _BYTES_C)
    bytes_r = gl.allocate_shared_memory(gl.uint8, [2, N, R], _BYTES_R)
    k_c = gl.allocate_shared_memory(gl.float16, [N, C], _SHARED)
    k_r = gl.allocate_shared_memory(gl.float16, [N, R], _SHARED)
    shared_weights = gl.allocate_shared_memory(gl.float16, [M, N], _SHARED)
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
            _start_load(c_desc, r_desc, bars, bytes_c, bytes_r, table, begin + ahead,
                        count + ahead, block_rows, ahead < num_tiles, BLOCK_TILES,
                        N * (C + R))  # fmt: skip
        row = first_query.to(gl.int64) * num_heads + first_row
        _load_queries(q + row * (C + R), num_rows, q_c, q_r)
        rows = first_row + gl.arange(0, M, gl.SliceLayout(1, _SCORES))
        visible = prefix + rows // num_heads + 1
        sums = gl.zeros([M, C], gl.float32, _SUMS)
        weights = gl.zeros([M, N], gl.float32, _SCORES)
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
        sums, weights, top = _walk(
            sums, weights, top, visible, scale, q_c, q_r, k_c, k_r, shared_weights,
            bytes_c, bytes_r, bars, c_desc, r_desc, table, begin, num_tiles, stop, count,
            block_rows, BLOCK_TILES,
        )  # fmt: skip
        count += num_tiles
        place = _find_slot(part, goes_on, first_row)
        _finish(sums, weights, top, scale, num_rows, is_cut, out + row * C, pieces + place * C,
                piece_logs + place)  # fmt: skip


@gluon.jit
def _walk(
    sums, weights, top, visible, scale, q_c, q_r, k_c, k_r, shared_weights, bytes_c, bytes_r,
    bars, c_desc, r_desc, table, begin, num_tiles, stop, count, block_rows,
    BLOCK_TILES: gl.constexpr,
):  # fmt: skip
    """Attend to a piece's tiles, of which the first two are on their way."""
    for tile in range(num_tiles):
        slot = (count + tile) % 2
        _wait_for_load(bars, count + tile, True)
        if tile == num_tiles - 1:
            # What lies behind the last position is anybody's, NaN too, and 0 times NaN is NaN.
            kept = stop - (begin + tile) * N
            _clear_rows(bytes_c.index(slot), kept, _WIDE)
            _synchronize()
        _widen(bytes_c.index(slot), k_c, _WIDE, 256)
        _widen(bytes_r.index(slot), k_r, _NARROW, 64)
        hopper.fence_async_shared()
        _synchronize()
        scores = _start_scores(q_c, q_r, k_c, k_r)
        _start_load(c_desc, r_desc, bars, bytes_c, bytes_r, table, begin + tile + 2,
                    count + tile + 2, block_rows, tile + 2 < num_tiles, BLOCK_TILES,
                    N * (C + R))  # fmt: skip
        scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
        shares, fade, top, weights = _weigh(
            scores, (begin + tile) * N, visible, top, weights, scale
        )
        shared_weights.store(shares.to(gl.float16))
        hopper.fence_async_shared()
        sums = _faded(sums, fade)
        _synchronize()
        sums = hopper.warpgroup_mma(shared_weights, k_c, sums, is_async=True)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        _synchronize()
    return sums, weights, top
