"""The two kernels of a combine, in Triton; see the package.

Compiled by Triton, and imported only where that is installed.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2
from engine.parallel.nvlink.buffer import ReceivedRows
from engine.parallel.nvlink.records import COMBINE
from engine.parallel.nvlink.shape import LINE, UNITS, NvlinkShape
from engine.parallel.nvlink.signals import await_all, pointer, record_of, signal
from engine.parallel.nvlink.window import Window

SENDERS = 512
"""Programs of a send, at most; shares of a rank's counter, so a power of two for each rank."""

COLUMNS = 2048
"""Columns of one program of a receive."""


@launched("rank")
def _send_sums(
    out, places, weights, bases, state,
    rank,
    R: tl.constexpr, T: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr,
    HALF: tl.constexpr, LINE: tl.constexpr, UNITS: tl.constexpr, STEP: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Send the sums of tokens program, program + STEP, ... of one rank, the next rank's first."""
    program = tl.program_id(0)
    owner = (rank + tl.program_id(1)) % R
    number = tl.load(state) + 1
    if (program == 0) & (owner == rank):
        tl.store(state + 1, number)
    base = tl.load(bases + owner)
    half = base + HALVES + (number % 2) * HALF
    columns = tl.arange(0, C)
    for token in range(program, T, STEP):
        slot = owner * T + token
        last = tl.cast(-1, tl.int32)
        for k in tl.static_range(K):
            last = tl.maximum(last, tl.load(places + slot * K + k))
        if last >= 0:
            total = tl.zeros([C], tl.float32)
            for k in tl.static_range(K):
                row = tl.load(places + slot * K + k).to(tl.int64)
                weight = tl.load(weights + slot * K + k)
                part = tl.load(out + row * D + columns, mask=(columns < D) & (row >= 0), other=0.0)
                total += part.to(tl.float32) * weight
            place = half + (rank * T + token).to(tl.int64) * (2 * D)
            target = pointer(place, tl.bfloat16) + columns
            tl.store(target, total.to(tl.bfloat16), mask=columns < D)
    signal(base, rank, number, owner >= 0, UNITS // STEP, LINE)


@launched("rank", "num_tokens")
def _receive_sums(
    ids, own, out, bases, state, ring,
    rank, num_tokens,
    R: tl.constexpr, L: tl.constexpr, T: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    HALVES: tl.constexpr, HALF: tl.constexpr, LINE: tl.constexpr, UNITS: tl.constexpr,
    C: tl.constexpr, HAS_OWN: tl.constexpr, SECONDS: tl.constexpr, SLOTS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Add up a token's sums, in the order of ranks."""
    token = tl.program_id(0)
    number = tl.load(state + 1)
    base = tl.load(bases + rank)
    half = base + HALVES + (number % 2) * HALF
    is_token = token < num_tokens
    columns = tl.program_id(1) * C + tl.arange(0, C)
    mask = (columns < D) & is_token
    wide = token.to(tl.int64) * D
    total = tl.zeros([C], tl.float32)
    if HAS_OWN:
        total += tl.load(own + wide + columns, mask=mask, other=0.0).to(tl.float32)
    hits = tl.cast(0, tl.int32)
    for k in tl.static_range(K):
        expert = tl.load(ids + token * K + k, mask=is_token, other=-1).to(tl.int32)
        hits |= tl.where(expert >= 0, 1 << (tl.maximum(expert, 0) // L), 0)
    is_first = (token == 0) & (tl.program_id(1) == 0)
    record = record_of(ring, number, is_first, R, SLOTS)
    await_all(base, number, record, KIND, R, LINE, UNITS, SECONDS, SLOTS)
    for source in tl.static_range(R):
        place = half + (source * T + token).to(tl.int64) * (2 * D)
        is_hit = ((hits >> source) & 1) == 1
        part = tl.load(pointer(place, tl.bfloat16) + columns, mask=mask & is_hit, other=0.0)
        total += part.to(tl.float32)
    tl.store(out + wide + columns, total.to(out.dtype.element_ty), mask=mask)
    if is_first:
        tl.store(state, number)


def send_sums(window: Window[NvlinkShape], out_LMD: Tensor, received: ReceivedRows) -> None:
    """Write each token's sum over this rank's experts, weighted, into its owner's buffer.

    Args:
        window: of this rank.
        out_LMD: [L, M, D] bfloat16, contiguous; the experts' output.
        received: by the dispatch.
    """
    shape = window.shape
    wanted = (shape.num_local_experts, shape.rows_per_expert, shape.hidden_size)
    require(
        out_LMD.shape == wanted and out_LMD.is_contiguous() and out_LMD.dtype == torch.bfloat16,
        "experts' output",
        (tuple(out_LMD.shape), out_LMD.stride(), out_LMD.dtype),
        f"contiguous {wanted} in bfloat16 is wanted",
    )
    step = min(UNITS, SENDERS // next_power_of_2(shape.num_ranks))
    _send_sums(
        (step, shape.num_ranks),
        (out_LMD, received.places.rows_TK, received.weights, window.bases, window.state),
        (),
        (window.rank,),
        (
            shape.num_ranks,
            shape.max_tokens_per_rank,
            shape.top_k,
            shape.hidden_size,
            shape.halves,
            shape.half_bytes,
            LINE,
            UNITS,
            step,
            next_power_of_2(shape.hidden_size),
        ),
        num_warps=8,
    )


def receive_sums(window: Window[NvlinkShape], ids_TK: Tensor, own_TD: Tensor | None) -> Tensor:
    """Wait for all ranks' sums, and add them up in float32, with `own_TD`.

    Args:
        window: of this rank.
        ids_TK: of the dispatch, [., K] int64 contiguous.
        own_TD: [., D] bfloat16 or None.

    Returns:
        [., D] bfloat16.
    """
    shape, num_tokens = window.shape, ids_TK.shape[0]
    size = shape.hidden_size
    most = shape.max_tokens_per_rank
    require(
        num_tokens <= most and ids_TK.shape[1] == shape.top_k and ids_TK.is_contiguous(),
        "routing",
        (tuple(ids_TK.shape), ids_TK.stride()),
        f"at most {most} tokens of {shape.top_k} experts, contiguous, are wanted",
    )
    require(
        own_TD is None or own_TD.shape == (num_tokens, size),
        "own term",
        None if own_TD is None else tuple(own_TD.shape),
        f"{(num_tokens, size)} is wanted",
    )
    out = torch.empty((num_tokens, size), dtype=torch.bfloat16, device=ids_TK.device)
    block = min(COLUMNS, next_power_of_2(size))
    # Without tokens a program waits all the same: what is sent next relies on it.
    _receive_sums(
        (max(1, num_tokens), ceil_div(size, block)),
        (ids_TK, out if own_TD is None else own_TD.contiguous(), out, *window.memory),
        (),
        (window.rank, num_tokens),
        (
            shape.num_ranks,
            shape.num_local_experts,
            shape.max_tokens_per_rank,
            shape.top_k,
            size,
            shape.halves,
            shape.half_bytes,
            LINE,
            UNITS,
            block,
            own_TD is not None,
            *window.waiting,
            COMBINE,
        ),
    )
    return out
