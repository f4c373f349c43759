"""What both kernels for Hopper share: sizes, which piece a program attends to, how rows leave.

Compiled by Triton; imported only where that is installed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

M = gl.constexpr(64)
N = gl.constexpr(64)
C = gl.constexpr(512)
R = gl.constexpr(64)
PART_INTS = gl.constexpr(8)
COLUMNS = gl.constexpr(128)
"""Of a quarter of C."""
QUARTERS = gl.constexpr(4)

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SHARED_32 = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
# Eight numbers of 16 bits a thread, or four of 32, rows of 128.
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
WIDE_32 = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))

synchronize = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed with Triton 3.7
"""Of all threads of a program."""


@gluon.jit
def find_piece(
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
def find_slot(part, goes_on, first_row):
    """Return the row of a sequence's piece: of a part, it is the first or the second."""
    slot = 2 * part + gl.where(goes_on, 0, 1)
    return slot.to(gl.int64) * gl.num_programs(0) * M + first_row


@gluon.jit
def copy_rows(room, num_rows, target, LAYOUT: gl.constexpr):
    """Copy rows of 128 columns out of shared memory to rows of 512, 16 bytes a thread at a time."""
    rows = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(target + rows * C + columns, room.load(LAYOUT), mask=rows < num_rows)


@gluon.jit
def sum_up(weight, top, scale):
    """Return the factor of a row's sums, and the logarithm of its weight, from its parts."""
    saw_nothing = weight == 0.0
    weight = gl.where(saw_nothing, 1.0, weight)
    return 1.0 / weight, gl.where(saw_nothing, float("-inf"), top * scale + gl.log2(weight))
