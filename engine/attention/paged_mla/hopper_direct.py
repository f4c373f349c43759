"""The kernel for Hopper's tensor cores, latents in e4m3, widened while tensor cores multiply.

`hopper_e4m3` brings bytes into shared memory, which leaves room for one widened tile: widening,
scores and values wait for one another. Here threads read the next tile's bytes into registers,
before this one's probabilities are computed, and write them as float16 to a second buffer while the
tensor cores multiply this one's values. Probabilities take the place of the tile's last 64 columns.

Shared memory holds, in KiB: queries 72, two widened tiles 144.
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
    _faded,
    _find_piece,
    _find_slot,
    _finish,
    _load_queries,
    _start_scores,
    _synchronize,
    _weigh,
)

READS_ROWS = True
"""Takes rows as bytes and how far they are apart, where others take two descriptors."""

# Sixteen bytes a thread, eight rows a warp: neither reading nor writing do threads meet in a bank.
_BYTES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [8, 1], [1, 0]))


@gluon.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["tables", "seq_lens", "cu_seqlens_q", "parts"],
)
def attend(
    latents, pitch, q, tables, seq_lens, cu_seqlens_q, parts, out, pieces, piece_logs,
    num_heads, scale, block_rows, table_width,
    BLOCK_TILES: gl.constexpr, ONE_QUERY: gl.constexpr,
):  # fmt: skip
    """Attend to latents in e4m3, rows of bytes `pitch` apart; see `hopper_kernel.attend`."""
    q_c = gl.allocate_shared_memory(gl.float16, [M, C], _SHARED)
    q_r = gl.allocate_shared_memory(gl.float16, [M, R], _SHARED)
    k_c = gl.allocate_shared_memory(gl.float16, [2, N, C], _SHARED)
    k_r = gl.allocate_shared_memory(gl.float16, [2, N, R], _SHARED)
    part, first_row = gl.program_id(1), gl.program_id(0) * M
    parts += part * PART_INTS
    first_seq, last_seq = gl.load(parts), gl.load(parts + 1)
    for index in range(last_seq - first_seq + 1):
        seq = first_seq + index
        first_query, prefix, num_rows, begin, num_tiles, stop, goes_on, is_cut = _find_piece(
            seq, parts, seq_lens, cu_seqlens_q, num_heads, first_row, ONE_QUERY
        )
        table = tables + seq.to(gl.int64) * table_width
        row = first_query.to(gl.int64) * num_heads + first_row
        _load_queries(q + row * (C + R), num_rows, q_c, q_r)
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
        place = _find_slot(part, goes_on, first_row)
        _finish(sums, weights, top, scale, num_rows, is_cut, out + row * C, pieces + place * C,
                piece_logs + place)  # fmt: skip
        _synchronize()


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
def _write(bits, wide):
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
    _write(_read(source, pitch, stop - begin * N, 0, C), k_c.index(0))
    _write(_read(source, pitch, stop - begin * N, C, R), k_r.index(0))
    hopper.fence_async_shared()
    _synchronize()
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
        _synchronize()
        scores = hopper.warpgroup_mma_wait(0, deps=(scores_soon,))
        shares, fade, top, weights = _weigh(scores, tile * N, visible, top, weights, scale)
        _synchronize()  # all warps have read the columns that weights replace
        k_r.index(slot).store(shares.to(gl.float16))
        hopper.fence_async_shared()
        sums = _faded(sums, fade)
        _synchronize()
        sums_soon = hopper.warpgroup_mma(k_r.index(slot), k_c.index(slot), sums, is_async=True)
        # Zeros behind the last tile, which nobody reads.
        _write(bits_c, k_c.index(following))
        _write(bits_r, k_r.index(following))
        hopper.fence_async_shared()
        sums = hopper.warpgroup_mma_wait(0, deps=(sums_soon,))
        _synchronize()
    return sums, weights, top
