"""The kernel of `hopper_seesaw`, with latents in e4m3: a third group of four warps widens them.

That group reads a tile's bytes into registers, waits until its slot is free, and writes them as
float16. The two groups that multiply are those of `hopper_seesaw`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from engine.attention.paged_mla.hopper_kernel import (
    _SHARED,
    PART_INTS,
    C,
    M,
    N,
    R,
    _find_piece,
)
from engine.attention.paged_mla.hopper_seesaw import (
    _LINE,
    EMPTY,
    FULL,
    _make_barriers,
    _tell,
    attend_half,
)

READS_ROWS = True
"""Takes rows as bytes and how far they are apart, where others take two descriptors."""

# Sixteen bytes a thread, eight rows a warp: neither reading nor writing do threads meet in a bank.
_BYTES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))


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
            (_bring_bytes, (
                latents, pitch, tables, seq_lens, cu_seqlens_q, parts, num_heads, block_rows,
                table_width, k_c, k_r, bars, BLOCK_TILES, ONE_QUERY,
            )),
        ],
        [4, 4],
        [208, 96],
    )  # fmt: skip


@gluon.jit
def _bring_bytes(
    latents, pitch, tables, seq_lens, cu_seqlens_q, parts, num_heads, block_rows, table_width,
    k_c, k_r, bars, BLOCK_TILES: gl.constexpr, ONE_QUERY: gl.constexpr,
):  # fmt: skip
    """Bring tiles in, each piece's first one into the first slot."""
    first_row = gl.program_id(0) * M
    parts += gl.program_id(1) * PART_INTS
    first_seq, last_seq = gl.load(parts), gl.load(parts + 1)
    uses_0 = first_row * 0
    uses_1 = first_row * 0
    for index in range(last_seq - first_seq + 1):
        seq = first_seq + index
        _, _, _, begin, num_tiles, stop, _, _ = _find_piece(
            seq, parts, seq_lens, cu_seqlens_q, num_heads, first_row, ONE_QUERY
        )
        table = tables + seq.to(gl.int64) * table_width
        for count in range(num_tiles):
            slot, tile = count % 2, begin + count
            block = gl.load(table + tile // BLOCK_TILES)
            row = block.to(gl.int64) * block_rows + tile % BLOCK_TILES * N
            uses = gl.where(slot == 0, uses_0, uses_1) + count // 2
            _bring_one(latents + row * pitch, pitch, stop - tile * N, k_c.index(slot),
                       k_r.index(slot), bars.index(EMPTY + slot), (uses + 1) & 1)  # fmt: skip
            _tell(bars.index(FULL + slot))
        uses_0 += (num_tiles + 1) // 2
        uses_1 += num_tiles // 2


@gluon.jit
def _bring_one(source, pitch, num_kept, k_c, k_r, empty, phase):
    """Read a tile, wait for its slot, write it."""
    bits_r = _read(source + C, pitch, num_kept, R)
    left = _read(source, pitch, num_kept, C // 2)
    right = _read(source + C // 2, pitch, num_kept, C // 2)
    mbarrier.wait(empty, phase, pred=True)
    k_r.store(_widened(bits_r))
    k_c.slice(0, C // 2, dim=1).store(_widened(left))
    k_c.slice(C // 2, C // 2, dim=1).store(_widened(right))
    hopper.fence_async_shared()


@gluon.jit
def _read(source, pitch, num_kept, WIDTH: gl.constexpr):
    """Return columns of a tile, zeros from row `num_kept` on."""
    # What lies behind the last position is anybody's, NaN too, and 0 times NaN is NaN.
    rows = gl.arange(0, N, gl.SliceLayout(1, _BYTES))[:, None]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, _BYTES))[None, :]
    return gl.load(source + rows * pitch + columns, mask=rows < num_kept, other=0)


@gluon.jit
def _widened(bits):
    """Return bytes of e4m3 as float16, which holds them exactly."""
    return bits.to(gl.float8e4nv, bitcast=True).to(gl.float16)
