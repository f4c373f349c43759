"""How ranks tell one another that their stores are done, in Triton, and what is noted of that.

Compiled by Triton, and imported only where that is installed. See the package for why it is right.
The counters count modulo 2**32: what is compared are differences.
"""

import os

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

_CYCLES_PER_SECOND = tl.constexpr(2 * 10**9)
"""At most."""

_LANES = tl.constexpr(32)
"""Of the first warp: one for each source, and some that have none."""

# A thread for each source reads its counter; the others go on to the barrier behind.
_BEGIN = """
{
    .reg .pred p, q;
    .reg .b32 source, number, some, all;
    .reg .b64 counter, record, begin, now, first, last;
    mov.u32 $0, 0;
    mov.u32 source, %tid.x;
    setp.ge.u32 p, source, $4;
    @p bra DONE;
    mad.wide.u32 counter, source, 4, $1;
    mov.u64 begin, %clock64;
"""
_WAIT = """
AGAIN:
    ld.acquire.sys.global.u32 number, [counter];
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
"""
# The same, but the threads leave together: one that left alone would be made to wait for the others
# right there, and could only tell when the last of them had come. What the clock says is noted in
# the loop.
_RECORD = """
    setp.eq.b64 p, $5, 0;
    @p bra AGAIN;
    mov.b32 all, 1;
    shl.b32 all, all, $4;
    sub.u32 all, all, 1;
    mov.b64 first, 0;
    mov.b64 last, 0;
LOOK:
    ld.acquire.sys.global.u32 number, [counter];
    mov.u64 now, %globaltimer;
    sub.s32 number, number, $2;
    add.s32 some, number, $7;
    setp.gt.s32 p, some, 0;
    setp.eq.and.u64 q, first, 0, p;
    @q mov.b64 first, now;
    setp.ge.s32 p, number, 0;
    setp.eq.and.u64 q, last, 0, p;
    @q mov.b64 last, now;
    vote.sync.all.pred q, p, all;
    @q bra THERE;
    mov.u64 now, %clock64;
    sub.u64 now, now, begin;
    setp.lt.u64 p, now, $3;
    @p bra LOOK;
    trap;
THERE:
    mad.wide.u32 record, source, 16, $5;
    st.global.v2.b64 [record+16], {first, last};
    setp.ne.u32 p, source, 0;
    @p bra DONE;
    st.global.b64 [$5], $6;
    bra DONE;
"""

_PLAIN = tl.constexpr(_BEGIN + _WAIT)
_RECORDED = tl.constexpr(_BEGIN + _RECORD + _WAIT)
"""Programs without a record ($5 is 0) wait as in the plain one."""


@triton.jit
def pointer(address, dtype: tl.constexpr):
    """Return an address in somebody's buffer, of which 16 is a divisor, as a pointer."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def record_of(ring, number, is_told, NUM_RANKS: tl.constexpr, SLOTS: tl.constexpr):
    """Return the address of a transfer's record, int64; 0 for a program that writes none.

    Args:
        ring: see `records`.
        number: of the transfer, int64.
        is_told: whether this program writes it; exactly one of a transfer does.
        NUM_RANKS: R.
        SLOTS: of the ring, 0 if nothing is recorded.
    """
    if SLOTS:
        address = ring.to(tl.int64) + (number % SLOTS) * (16 * (NUM_RANKS + 1))
        record = tl.where(is_told, address, 0)
    else:
        record = tl.cast(0, tl.int64)
    return record


@triton.jit
def _look_once(counters, target, header, record, NUM_RANKS: tl.constexpr):
    """Do what the interpreter can: nobody waits, and for want of a clock the header is the time."""
    lanes = tl.arange(0, _LANES)
    is_source = lanes < NUM_RANKS
    raised = tl.load((counters + lanes * 4).to(tl.pointer_type(tl.int32)), mask=is_source, other=0)
    missing = tl.where(is_source, raised - target, 0)
    assert tl.max(tl.abs(missing), axis=0) == 0, "not all ranks have sent"
    words = record.to(tl.pointer_type(tl.int64))
    tl.store(words, header, mask=record != 0)
    for word in tl.static_range(2, 4):
        tl.store(words + 2 * lanes + word, header, mask=is_source & (record != 0))


@triton.jit
def await_all(
    base, number, record,
    KIND: tl.constexpr, NUM_RANKS: tl.constexpr, LINE: tl.constexpr, UNITS: tl.constexpr,
    SECONDS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Hold the program until all ranks have sent this transfer.

    Args:
        base: address of the own buffer, int64.
        number: of the transfer, from 1, int64.
        record: where this program notes when the ranks came, see `record_of`.
        KIND: of the transfer, see `records`.
        NUM_RANKS: R.
        LINE: see `shape`.
        UNITS: see `shape`.
        SECONDS: after which the program gives up, which is an error of the GPU.
        SLOTS: of the ring, 0 if nothing is recorded.
    """
    counters = base + (number % 2) * LINE
    # Of the transfers of this parity, this is number (number + 1) // 2.
    target = ((number + 1) // 2 * UNITS).to(tl.int32)
    if IS_INTERPRETED:
        _look_once(counters, target, number * 2 + KIND, record, NUM_RANKS)
    elif SLOTS:
        tl.inline_asm_elementwise(
            _RECORDED,
            "=r,l,r,l,r,l,l,r",
            [
                counters,
                target,
                tl.full([], SECONDS * _CYCLES_PER_SECOND, tl.int64),
                tl.full([], NUM_RANKS, tl.int32),
                record,
                number * 2 + KIND,
                tl.full([], UNITS, tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            _PLAIN,
            "=r,l,r,l,r",
            [
                counters,
                target,
                tl.full([], SECONDS * _CYCLES_PER_SECOND, tl.int64),
                tl.full([], NUM_RANKS, tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def signal(bases, rank, number, mask, UNITS: tl.constexpr, LINE: tl.constexpr):
    """Raise this rank's counters, behind all that the program has stored.

    Args:
        bases: addresses of the buffers, int64, one or several.
        rank: of this process.
        number: of the transfer.
        mask: in whose buffers, of the shape of `bases`.
        UNITS: how far.
        LINE: see `shape`.
    """
    tl.debug_barrier()
    counters = (bases + (number % 2) * LINE + rank * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_add(counters, UNITS, mask=mask, sem="release", scope="sys")
