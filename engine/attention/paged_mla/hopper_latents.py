"""How threads bring latents in e4m3 from memory to where tensor cores read them, as float16.

Compiled by Triton; imported only where that is installed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.attention.paged_mla.hopper_pieces import SHARED_32, N

PAIR = gl.constexpr(128)
# Four words a thread, eight rows a warp: neither reading nor writing do threads meet in a bank.
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
FIRST = gl.constexpr(256)
"""Columns of the first half of a tile; the second has as many, and R."""
_UNPACK = gl.constexpr(
    """{ .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high; }"""
)
# By one thread: a tile's rows lie one after the other.
_FETCH = gl.constexpr(
    """{ .reg .pred one; .reg .pred some; .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 one, thread, 0;
    setp.ne.and.u32 some, $2, 0, one;
    @some cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0; }"""
)


@gluon.jit
def find_rows(table, tile, num_left, block_rows, BLOCK_TILES: gl.constexpr):
    """Return where a pair of tiles begins, of which `num_left` are there."""
    first = gl.load(table + tile // BLOCK_TILES, mask=num_left > 0, other=0)
    second = gl.load(table + (tile + 1) // BLOCK_TILES, mask=num_left > 1, other=0)
    first = first * block_rows + tile % BLOCK_TILES * N
    return first, second * block_rows + (tile + 1) % BLOCK_TILES * N


@gluon.jit
def read(latents, pitch, rows, num_kept, first_column: gl.constexpr, WIDTH: gl.constexpr):
    """Return columns of a pair of tiles, four to a word, zeros from row `num_kept` on."""
    # What lies behind the last position is anybody's, NaN too, and 0 times NaN is NaN.
    words, pitch = latents.to(gl.pointer_type(gl.int32), bitcast=True), pitch // 4
    first, second = rows
    here = gl.arange(0, PAIR, gl.SliceLayout(1, _WORDS))
    starts = (gl.where(here < N, first, second - N) + here).to(gl.int64) * pitch
    columns = first_column // 4 + gl.arange(0, WIDTH // 4, gl.SliceLayout(0, _WORDS))
    return gl.load(
        words + starts[:, None] + columns[None, :], mask=(here < num_kept)[:, None], other=0
    )


@gluon.jit
def widen(words, wide):
    """Write words of four e4m3 as float16, which holds them exactly."""
    low, high = gl.inline_asm_elementwise(
        _UNPACK, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    width: gl.constexpr = wide.shape[1] // 2
    pairs = wide._reinterpret(gl.int32, [PAIR, width], SHARED_32)
    pairs.store(gl.join(low, high).reshape([PAIR, width]))


@gluon.jit
def fetch(latents, pitch, rows, num_left):
    """Have a pair of tiles, of which `num_left` are there, brought to the L2 cache."""
    first, second = rows
    _fetch_tile(latents + first.to(gl.int64) * pitch, pitch, num_left > 0)
    _fetch_tile(latents + second.to(gl.int64) * pitch, pitch, num_left > 1)


@gluon.jit
def _fetch_tile(start, pitch, is_there):
    size = gl.where(is_there, N * pitch, 0)
    gl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [start.to(gl.int64, bitcast=True), size], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
