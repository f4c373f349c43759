"""How ranks tell one another that their stores are done, in Triton.

Compiled by Triton, and imported only where that is installed. See the package for why it is right.
The counters count modulo 2**32: what is compared are differences.
"""

import os

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

_CYCLES_PER_SECOND = tl.constexpr(2 * 10**9)
"""At most."""

# The first thread alone reads; the others go on to the barrier behind.
_WAIT = tl.constexpr("""
{
    .reg .pred p;
    .reg .b32 number;
    .reg .b64 begin, now;
    mov.u32 $0, 0;
    mov.u32 number, %tid.x;
    setp.ne.u32 p, number, 0;
    @p bra DONE;
    mov.u64 begin, %clock64;
AGAIN:
    ld.acquire.sys.global.u32 number, [$1];
    sub.s32 number, number, $2;
    setp.ge.s32 p, number, 0;
    @p bra DONE;
    mov.u64 now, %clock64;
    sub.u64 now, now, begin;
    setp.lt.u64 p, now, $3;
    @p bra AGAIN;
    trap;
DONE:
}
""")


@triton.jit
def await_all(
    base, number,
    NUM_RANKS: tl.constexpr, LINE: tl.constexpr, UNITS: tl.constexpr, SECONDS: tl.constexpr,
):  # fmt: skip
    """Hold the program until all ranks have sent this transfer.

    Args:
        base: address of the own buffer, int64.
        number: of the transfer, from 1, int64.
        NUM_RANKS: R.
        LINE: see `shape`.
        UNITS: see `shape`.
        SECONDS: after which the program gives up, which is an error of the GPU.
    """
    counter = base + (number % 2) * LINE
    # Of the transfers of this parity, this is number (number + 1) // 2.
    target = ((number + 1) // 2 * (NUM_RANKS * UNITS)).to(tl.int32)
    if IS_INTERPRETED:
        raised = tl.load(counter.to(tl.pointer_type(tl.int32)))
        assert raised == target, "not all ranks have sent"
    else:
        tl.inline_asm_elementwise(
            _WAIT,
            "=r,l,r,l",
            [counter, target, tl.full([], SECONDS * _CYCLES_PER_SECOND, tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def signal(bases, number, mask, UNITS: tl.constexpr, LINE: tl.constexpr):
    """Raise counters, behind all that the program has stored.

    Args:
        bases: addresses of the buffers, int64, one or several.
        number: of the transfer.
        mask: whose counters, of the shape of `bases`.
        UNITS: how far.
        LINE: see `shape`.
    """
    tl.debug_barrier()
    counters = (bases + (number % 2) * LINE).to(tl.pointer_type(tl.int32))
    tl.atomic_add(counters, UNITS, mask=mask, sem="release", scope="sys")
