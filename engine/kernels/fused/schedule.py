"""FlashMLA's schedule: which part of the GPU attends to which pages, by the lengths of a step.

Computed on the device, so that a replayed graph makes it anew. `schedule_reference` says what is
chosen and why. The key idea: the capacities worth trying are few, so that each is a lane of one
vector, and one walk over the sequences fills the parts for all of them. A second walk, with the
capacity that was chosen, notes where every sequence lies; what a part has to do follows from that
for all parts at once. A program does both walks and writes a few parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.schedule_reference import (
    CUT_COST,
    MAX_SPARE,
    OVERHEAD,
    PAGE,
    PIECE_COST,
    QUARTERS,
)
from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2

MAX_SEQS = 256
"""A walk takes time for each sequence."""

ROW = 8
"""Integers of a part."""

PARTS = 16
"""Of a program."""

LANES = 2 * (MAX_SPARE + 1)
"""Capacities with cuts, then without."""

FAR = 1 << 24
"""More than any number of pages or parts."""


@triton.jit
def _place(room, pages, capacity, cuts, OVERHEAD: tl.constexpr, FAR: tl.constexpr):
    """Place one sequence: return whether any of it goes into the room left, and how it is cut.

    Returns pages of the first piece, whether that lies in the part so far, parts begun, and the
    room left then.
    """
    fits = room >= pages + OVERHEAD
    here = tl.where(cuts, tl.maximum(room - OVERHEAD, 0), 0)
    step = tl.where(cuts, capacity - OVERHEAD, FAR)
    rest = pages - here
    # Exact: halves are far from integers, by more than the error of this quotient.
    begun = ((rest.to(tl.float32) - 0.5) / step.to(tl.float32)).to(tl.int32) + 1
    last = rest - (begun - 1) * step
    stays = fits | (here > 0)
    head = tl.where(fits, pages, tl.where(stays, here, tl.minimum(pages, step)))
    begun = tl.where(fits, 0, begun)
    room = tl.where(fits, room - pages, capacity - last) - OVERHEAD
    return head, stays, begun, room


@triton.jit
def _count_pages(length, PAGE: tl.constexpr):
    return tl.maximum((length + PAGE - 1) // PAGE, 1)


@triton.jit
def _choose(
    seq_lens, num_seqs, num_parts, bound, longest, L: tl.constexpr, PAGE: tl.constexpr,
    OVERHEAD: tl.constexpr, CUT_COST: tl.constexpr, PIECE_COST: tl.constexpr,
    QUARTERS: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Return the cheapest capacity that works, and whether sequences are cut."""
    lane = tl.arange(0, L)
    cuts = lane < L // 2
    capacities = bound + lane % (L // 2)
    part = tl.zeros([L], tl.int32)
    room = capacities
    most = tl.zeros([L], tl.int32)
    following = tl.load(seq_lens)
    for seq in range(num_seqs):
        count = _count_pages(following, PAGE)
        # Read one step ahead of its use.
        following = tl.load(seq_lens + tl.minimum(seq + 1, num_seqs - 1))
        _, stays, begun, room = _place(room, count, capacities, cuts, OVERHEAD, FAR)
        part += begun
        most = tl.maximum(most, begun + stays.to(tl.int32))
    works = (part < num_parts) & (cuts | (capacities >= longest + OVERHEAD))
    cost = capacities * QUARTERS + most * PIECE_COST + tl.where(most > 1, CUT_COST, 0)
    # Among equals the whole ones, then the smaller capacity.
    rank = (lane + L // 2) % L
    chosen = tl.min(tl.where(works, cost * L + rank, FAR * 64), axis=0) % L
    return bound + chosen % (L // 2), chosen >= L // 2


@triton.jit
def _locate(
    seq_lens, num_seqs, capacity, cuts, B: tl.constexpr, PAGE: tl.constexpr,
    OVERHEAD: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Return the first and the last part of every sequence, and the pages of its first piece."""
    rows = tl.arange(0, B)
    first = tl.full([B], FAR, tl.int32)
    last = tl.full([B], FAR, tl.int32)
    head = tl.zeros([B], tl.int32)
    part = capacity * 0
    room = capacity
    following = tl.load(seq_lens)
    for seq in range(num_seqs):
        count = _count_pages(following, PAGE)
        following = tl.load(seq_lens + tl.minimum(seq + 1, num_seqs - 1))
        size, stays, begun, room = _place(room, count, capacity, cuts, OVERHEAD, FAR)
        start = tl.where(stays, part, part + 1)
        part += begun
        is_this = rows == seq
        first = tl.where(is_this, start, first)
        last = tl.where(is_this, part, last)
        head = tl.where(is_this, size, head)
    return first, last, head


@triton.jit
def _store_parts(tiles, index, num_parts, first, last, head, pages, step, ROW: tl.constexpr):
    """Write the rows of some parts."""
    part, first, last = index[:, None], first[None, :], last[None, :]
    begin = tl.sum((last < part).to(tl.int32), axis=1)
    end = tl.sum((first <= part).to(tl.int32), axis=1) - 1
    before = head[None, :] + (part - 1 - first) * step
    enters = (first < part) & (part <= last)
    leaves = (first <= part) & (part < last)
    begin_page = tl.sum(tl.where(enters, before, 0), axis=1)
    begin_piece = tl.sum(tl.where(enters, part - first, 0), axis=1)
    is_end = tl.arange(0, pages.shape[0])[None, :] == end[:, None]
    until = tl.where(leaves, before + step, pages[None, :])
    end_page = tl.sum(tl.where(is_end, until, 0), axis=1)
    is_first_cut = tl.max(enters.to(tl.int32), axis=1)
    is_last_cut = tl.max(leaves.to(tl.int32), axis=1)
    either = tl.where(begin == end, tl.maximum(is_first_cut, is_last_cut), 0)
    row = tiles + index * ROW
    mask = index < num_parts
    tl.store(row, begin, mask=mask)
    tl.store(row + 1, end, mask=mask)
    tl.store(row + 2, begin_page, mask=mask)
    tl.store(row + 3, end_page, mask=mask)
    tl.store(row + 4, begin_piece, mask=mask)
    tl.store(row + 5, tl.maximum(is_first_cut, either), mask=mask)
    tl.store(row + 6, tl.maximum(is_last_cut, either), mask=mask)
    tl.store(row + 7, index * 0, mask=mask)


@launched("num_seqs")
def _schedule(
    seq_lens, tiles, sums, num_parts, num_seqs,
    B: tl.constexpr, P: tl.constexpr, L: tl.constexpr, PAGE: tl.constexpr,
    OVERHEAD: tl.constexpr, CUT_COST: tl.constexpr, PIECE_COST: tl.constexpr,
    QUARTERS: tl.constexpr, FAR: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, B)
    is_seq = rows < num_seqs
    lengths = tl.load(seq_lens + rows, mask=is_seq, other=0)
    pages = tl.where(is_seq, _count_pages(lengths, PAGE), 0)
    total = tl.sum(pages, axis=0) + num_seqs * OVERHEAD
    bound = tl.maximum((total + num_parts - 1) // num_parts, OVERHEAD + 1)
    capacity, cuts = _choose(
        seq_lens, num_seqs, num_parts, bound, tl.max(pages, axis=0), L, PAGE,
        OVERHEAD, CUT_COST, PIECE_COST, QUARTERS, FAR,
    )  # fmt: skip
    first, last, head = _locate(seq_lens, num_seqs, capacity, cuts, B, PAGE, OVERHEAD, FAR)
    index = tl.program_id(0) * P + tl.arange(0, P)
    _store_parts(tiles, index, num_parts, first, last, head, pages, capacity - OVERHEAD, ROW)
    if tl.program_id(0) == 0:
        counts = tl.where(is_seq, last - first + 1, 0)
        tl.store(sums + 1 + rows, tl.cumsum(counts, axis=0), mask=is_seq)
        tl.store(sums + rows, counts * 0, mask=rows == 0)


def schedule(
    seq_lens_S: Tensor, num_parts: int, *, overhead: int = OVERHEAD
) -> tuple[Tensor, Tensor]:
    """Return rows of parts [P, 8] and running sums of pieces [S + 1], both int32.

    See `schedule_reference.tabulate`; chosen as `best_schedule` does.

    Args:
        seq_lens_S: [S] int32, contiguous, at most MAX_SEQS of them.
        num_parts: P.
        overhead: of a piece, in pages; at most MAX_SPARE.
    """
    (num_seqs,) = seq_lens_S.shape
    require(0 < num_seqs <= MAX_SEQS, "sequences", num_seqs, f"1 to {MAX_SEQS} are wanted")
    require(overhead <= MAX_SPARE, "overhead", overhead, f"at most {MAX_SPARE} is wanted")
    require(seq_lens_S.is_contiguous(), "lengths", seq_lens_S.stride(), "no gaps are wanted")
    device = seq_lens_S.device
    tiles = torch.empty((num_parts, ROW), dtype=torch.int32, device=device)
    sums = torch.empty(num_seqs + 1, dtype=torch.int32, device=device)
    _schedule(
        (ceil_div(num_parts, PARTS),),
        (seq_lens_S, tiles, sums),
        (num_parts,),
        (num_seqs,),
        (
            max(16, next_power_of_2(num_seqs)), PARTS, LANES, PAGE,
            overhead, CUT_COST, PIECE_COST, QUARTERS, FAR, ROW,
        ),
    )  # fmt: skip
    return tiles, sums
