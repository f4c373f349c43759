"""The two kernels that bring experts' results home as sums, in Triton; see the package.

Of decode's combine, and of sums over ranks that share heads: a sum of a token's weighted rows is
made where it is sent, and a rank that has none of its experts sends nothing for it.

Legend: R ranks, t tokens of a rank, P tokens of all of them, K experts per token, M rows of this
rank's experts, D hidden size.

Compiled by Triton, and imported only where that is installed.
"""

from typing import Protocol, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2
from engine.parallel.nvlink.records import COMBINE
from engine.parallel.nvlink.shape import LINE, UNITS
from engine.parallel.nvlink.signals import await_all, pointer, record_of, signal
from engine.parallel.nvlink.window import Shape, Window

SENDERS = 512
"""Programs of a send, at most; shares of a rank's counter, so a power of two for each rank."""

COLUMNS = 2048
"""Columns of one program of a receive."""


class SumShape(Shape, Protocol):
    """The sizes of an exchange by which sums travel."""

    @property
    def hidden_size(self) -> int:
        """D."""
        ...

    @property
    def halves(self) -> int:
        """Bytes before the half of even transfers."""
        ...

    @property
    def half_bytes(self) -> int:
        """Of one half."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Of one rank's sums in a half."""
        ...


ShapeT = TypeVar("ShapeT", bound=SumShape)


@launched("rank", "num_tokens")
def _send_sums(
    out, places, weights, bases, state,
    rank, num_tokens,
    R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr, HALVES: tl.constexpr,
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
    for token in range(program, num_tokens, STEP):
        slot = owner * num_tokens + token
        last = tl.cast(-1, tl.int32)
        for k in tl.static_range(K):
            last = tl.maximum(last, tl.load(places + slot * K + k))
        if last >= 0:
            total = tl.zeros([C], tl.float32)
            for k in tl.static_range(K):
                row = tl.load(places + slot * K + k).to(tl.int64)
                # Weights of pairs without a row may be anything, NaN included.
                weight = tl.load(weights + slot * K + k, mask=row >= 0, other=0.0)
                part = tl.load(out + row * D + columns, mask=(columns < D) & (row >= 0), other=0.0)
                total += part.to(tl.float32) * weight
            place = half + rank.to(tl.int64) * SLOT + tl.cast(token, tl.int64) * (2 * D)
            target = pointer(place, tl.bfloat16) + columns
            tl.store(target, total.to(tl.bfloat16), mask=columns < D)
    signal(base, rank, number, owner >= 0, UNITS // STEP, LINE)


@launched("rank", "num_tokens")
def _receive_sums(
    ids, own, out, bases, state, ring,
    rank, num_tokens,
    R: tl.constexpr, L: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr,
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
        place = half + source * SLOT + token.to(tl.int64) * (2 * D)
        is_hit = ((hits >> source) & 1) == 1
        part = tl.load(pointer(place, tl.bfloat16) + columns, mask=mask & is_hit, other=0.0)
        total += part.to(tl.float32)
    tl.store(out + wide + columns, total.to(out.dtype.element_ty), mask=mask)
    if is_first:
        tl.store(state, number)


def send_sums(
    window: Window[ShapeT], out_MD: Tensor, places_PK: Tensor, weights_PK: Tensor
) -> None:
    """Write each token's sum over this rank's experts, weighted, into its owner's buffer.

    Args:
        window: of this rank.
        out_MD: [M, D] bfloat16, contiguous; the experts' output.
        places_PK: [R * t, K] int32, contiguous; the row of each pair, -1 where there is none.
        weights_PK: [R * t, K] float32, contiguous; anything where there is no row.
    """
    shape = window.shape
    size = shape.hidden_size
    require(
        out_MD.shape[1:] == (size,) and out_MD.is_contiguous() and out_MD.dtype == torch.bfloat16,
        "experts' output",
        (tuple(out_MD.shape), out_MD.stride(), out_MD.dtype),
        f"contiguous rows of {size} in bfloat16 are wanted",
    )
    (num_pairs, top_k), num_tokens = places_PK.shape, places_PK.shape[0] // shape.num_ranks
    require(
        num_pairs == num_tokens * shape.num_ranks
        and num_tokens * 2 * size <= shape.slot_bytes
        and weights_PK.shape == places_PK.shape
        and places_PK.is_contiguous()
        and weights_PK.is_contiguous(),
        "places of rows",
        (tuple(places_PK.shape), places_PK.stride(), weights_PK.stride()),
        f"contiguous, as many for each of {shape.num_ranks} ranks as there is room for",
    )
    programs = min(UNITS, SENDERS // next_power_of_2(shape.num_ranks))
    step = min(programs, next_power_of_2(max(1, num_tokens)))
    _send_sums(
        (step, shape.num_ranks),
        (out_MD, places_PK, weights_PK, window.bases, window.state),
        (),
        (window.rank, num_tokens),
        (
            shape.num_ranks,
            top_k,
            size,
            shape.slot_bytes,
            shape.halves,
            shape.half_bytes,
            LINE,
            UNITS,
            step,
            next_power_of_2(size),
        ),
        num_warps=8,
    )


def receive_sums(
    window: Window[ShapeT], ids_TK: Tensor, own_TD: Tensor | None, *, num_local_experts: int
) -> Tensor:
    """Wait for all ranks' sums, and add them up in float32 in the order of ranks, with `own_TD`.

    Args:
        window: of this rank.
        ids_TK: [t, K] int64 or int32, contiguous; the experts of this rank's tokens, -1 for none.
        own_TD: [t, D] bfloat16 or None.
        num_local_experts: of each rank.

    Returns:
        [t, D] bfloat16.
    """
    shape, (num_tokens, top_k) = window.shape, ids_TK.shape
    size = shape.hidden_size
    require(
        num_tokens * 2 * size <= shape.slot_bytes and ids_TK.is_contiguous(),
        "routing",
        (tuple(ids_TK.shape), ids_TK.stride()),
        f"contiguous, at most {shape.slot_bytes // (2 * size)} tokens",
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
            num_local_experts,
            top_k,
            size,
            shape.slot_bytes,
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
