"""Bring weights into the L2 cache while the memory has nothing else to do.

A thread asks for a chunk and does not wait for it: the kernel is over long before the bytes are
there, so it takes no room from what runs next. It reads nothing that another kernel writes, and so,
launched as a dependent one, asks first and waits afterwards, for the sake of the order behind it.
"""

from typing import Any

import triton
import triton.language as tl

from engine.kernels.fused.dependent import joins_chain
from engine.kernels.fused.launch import ceil_div
from engine.kernels.weight_chunks import WeightChunks

LANES = 32
"""Chunks that a program asks for at a time, one a thread."""
MAX_PROGRAMS = 132

# An address of 0 is none.
ASK: tl.constexpr = tl.constexpr(
    "{ .reg .pred p; setp.ne.s64 p, $1, 0;"
    " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)
ASK_AND_KEEP: tl.constexpr = tl.constexpr(
    "{ .reg .pred p; .reg .b64 policy; setp.ne.s64 p, $1, 0;"
    " createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
    " @p cp.async.bulk.prefetch.L2.global.L2::cache_hint [$1], $2, policy; mov.u32 $0, 0; }"
)


@triton.jit
def _prefetch(
    addresses, num_chunks, chunk_bytes, num_programs,
    B: tl.constexpr, KEEP: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(tl.program_id(0) * B, num_chunks, num_programs * B):
        places = start + tl.arange(0, B)
        address = tl.load(addresses + places, mask=places < num_chunks, other=0)
        size = tl.zeros([B], tl.int32) + chunk_bytes
        tl.inline_asm_elementwise(
            ASK_AND_KEEP if KEEP else ASK, "=r,l,r", [address, size],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()


def prefetch(chunks: WeightChunks, *, max_programs: int = MAX_PROGRAMS, keep: bool = False) -> None:
    """Ask for the chunks, on the current stream.

    Args:
        chunks: on the current device, a Hopper GPU or a later one.
        max_programs: at most so many.
        keep: ask the cache to drop them last.
    """
    num_chunks = chunks.addresses_N.shape[0]
    num_programs = min(max_programs, ceil_div(num_chunks, LANES))
    is_dependent = joins_chain()
    options: dict[str, Any] = {"launch_pdl": True} if is_dependent else {}
    _prefetch[(num_programs,)](
        chunks.addresses_N, num_chunks, chunks.chunk_bytes, num_programs, LANES, keep, is_dependent,
        num_warps=1, **options,
    )  # fmt: skip
