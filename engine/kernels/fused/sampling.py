"""One row of logits to one token, in one program: bias, penalties, truncation, noise, argmax.

What `GraphSampler` writes as a dozen operations over [B, V], here read once, twice or three times,
and a row pays for what it asks for. The key idea is to draw first and truncate afterwards: the
winner among all tokens is the winner among those that a top_p keeps, if it is one of them, and
that is two sums, no threshold. It is one of them with a probability of at least top_p. If not,
neither is any token with as small a logit, and the row is drawn again from the others; once these
are few they are set apart and the threshold is searched there. A top_k is found among the lanes'
peaks instead: the k-th largest of these bounds the k-th largest logit, so little more than the
top_k best tokens have to be set apart.

Sums are of whole numbers (`engine.sampling.truncation`): their order changes no token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.invariants import require
from engine.kernels.fused.noise import (
    LOG2E,
    first_of_race,
    gumbel,
    lane_bounds,
    lane_peaks,
    row_key,
)
from engine.kernels.fused.truncation import (
    ALL_ORDERS,
    judge,
    least_of_best,
    mass_of_best,
    order_of,
    scaled_of,
    search,
    set_apart,
)

CANDIDATES = 8192
"""Room for the candidates of a row; more are not set apart."""
FEW_ROWS = 132
"""SMs of an H200: so many rows have one each, and get programs twice as wide."""
MOST_SIZE = tl.constexpr(1e4)
"""Of a peak in units of log(2), up to which float32 bounds the noise well enough."""


@triton.jit
def _edit(values, edit_ids, edits, edit_ends, output_index, NUM: tl.constexpr, ROOM: tl.constexpr):
    """Add the row's bias and, while it is short, what makes its stop tokens impossible."""
    places = tl.arange(0, ROOM)
    mask = places < NUM
    ends = tl.load(edit_ends + places, mask=mask, other=0)
    is_due = mask & (output_index < ends)
    ids = tl.load(edit_ids + places, mask=is_due, other=0)
    amounts = tl.load(edits + places, mask=is_due, other=0.0)
    tl.atomic_add(values + ids, amounts, mask=is_due, sem="relaxed")
    tl.debug_barrier()  # what a thread has changed, others read


@triton.jit
def _penalise(values, seen, vocab, repetition, frequency, presence, BLOCK: tl.constexpr):
    """Change the logits of seen tokens in place."""
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        entry = tl.load(seen + offsets, mask=offsets < vocab, other=0)
        is_seen = entry > 0
        value = tl.load(values + offsets, mask=is_seen, other=0.0)
        value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        number = (entry >> 1).to(tl.float32)
        value = value - frequency * number - presence * (entry > 1).to(tl.float32)
        tl.store(values + offsets, value, mask=is_seen)
    tl.debug_barrier()


@triton.jit
def _argmax(values, vocab, LANES: tl.constexpr):
    """Return the first of the largest logits."""
    peaks = tl.full((LANES,), float("-inf"), tl.float32)
    places = tl.zeros((LANES,), tl.int32)
    for start in range(0, vocab, LANES):
        offsets = start + tl.arange(0, LANES)
        value = tl.load(values + offsets, mask=offsets < vocab, other=float("-inf"))
        places = tl.where(value > peaks, offsets, places)
        peaks = tl.maximum(peaks, value)
    peak = tl.max(peaks, axis=0)
    return tl.min(tl.where(peaks == peak, places, vocab - 1), axis=0)


@triton.jit
def _draw_kept(kept, kept_ids, count, floor, bound, key, BLOCK: tl.constexpr):
    """Return the candidate with the largest sum of logit and noise, the first of equals."""
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        scaled = tl.load(kept + offsets, mask=mask, other=float("-inf"))
        ids = tl.load(kept_ids + offsets, mask=mask, other=0)
        is_kept = mask & (scaled >= floor) & (order_of(scaled) <= bound)
        noisy = tl.where(is_kept, scaled + gumbel(key, ids), float("-inf"))
        block_best = tl.max(noisy, axis=0)
        winner = tl.min(tl.where(is_kept & (noisy == block_best), ids, 0x7FFFFFFF), axis=0)
        is_better = (block_best > best) | ((block_best == best) & (winner < token))
        token = tl.where(is_better, winner, token)
        best = tl.maximum(best, block_best)
    return token


@triton.jit
def _draw_open(
    values, kept, kept_ids, counter, vocab, key, peaks, bounds, has_bounds, peak, temperature,
    floor, top_p, total, CANDIDATES: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the token of a row of which no candidates are set apart.

    Scaled logits below `floor` are dropped. top_p takes its share of `total`, or if that is 0, of
    the mass from `floor` on. Without `has_bounds`, `bounds` say nothing.
    """
    scale = LOG2E / temperature
    token = tl.zeros((), tl.int32)
    one = tl.full((), 1, tl.int32)
    least = floor
    is_open = one
    while is_open != 0:
        if has_bounds == 0:
            # Rounding aside, where the scaled logit is the least that takes part.
            low = peak + least * temperature * 1.00001 - tl.abs(peak) * 1e-6
            peaks, bounds = lane_bounds(values, vocab, key, scale, peak, low, LANES)
        token, pivot = first_of_race(
            values, vocab, key, peaks, bounds, peak, temperature, scale, least, LANES, GROUP
        )
        is_open = tl.zeros((), tl.int32)
        if (top_p < 1.0) & (order_of(pivot) > 0):
            is_dropped, total, number = judge(
                values, vocab, peak, temperature, floor, pivot, top_p, total, CANDIDATES,
                LANES // 2,
            )  # fmt: skip
            if is_dropped != 0:
                least = scaled_of(order_of(pivot) - 1)
                if number <= CANDIDATES:
                    count = set_apart(
                        values, kept, kept_ids, counter, vocab, peak, temperature, least,
                        CANDIDATES, LANES,
                    )  # fmt: skip
                    bound = search(
                        values, kept, count, one, peak, temperature, least,
                        top_p * total.to(tl.float64), True, LANES // 4,
                    )  # fmt: skip
                    token = _draw_kept(kept, kept_ids, count, least, bound, key, LANES // 4)
                else:
                    is_open = one
                    has_bounds = tl.zeros((), tl.int32)
    return token


@triton.jit
def _sample(
    values, kept, kept_ids, counter, vocab, key, temperature, top_p, floor, top_k,
    CANDIDATES: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the token of a row that is not greedy."""
    scale = LOG2E / temperature
    has_bounds = ((top_k >= vocab) & (floor == float("-inf"))).to(tl.int32)
    if has_bounds != 0:
        peaks, bounds = lane_bounds(values, vocab, key, scale, 0.0, float("-inf"), LANES)
    else:
        peaks = lane_peaks(values, vocab, LANES)
        bounds = peaks
    peak = tl.max(peaks, axis=0)
    # Bounds from before the peak was known are as exact as its size allows, else made anew.
    size = tl.abs(peak) * scale
    has_bounds = tl.where(size < MOST_SIZE, has_bounds, 0)
    bounds += size * 1e-6 - peak * scale
    token = tl.zeros((), tl.int32)
    # Of NaN and infinity nothing can be said; any token will do.
    if tl.abs(peak) < float("inf"):
        use_kept = tl.zeros((), tl.int32)
        total = tl.zeros((), tl.int64)
        if top_k < vocab:
            least = tl.maximum(least_of_best(peaks, peak, temperature, top_k, LANES), floor)
            count = set_apart(
                values, kept, kept_ids, counter, vocab, peak, temperature, least, CANDIDATES, LANES
            )
            use_kept = (count <= CANDIDATES).to(tl.int32)
            count = tl.where(use_kept != 0, count, vocab)
            bound = search(
                values, kept, count, use_kept, peak, temperature, floor, top_k.to(tl.float64),
                False, LANES // 4,
            )  # fmt: skip
            if top_p < 1.0:
                total = mass_of_best(
                    values, kept, count, use_kept, peak, temperature, floor, bound, top_k,
                    LANES // 4,
                )  # fmt: skip
            floor = tl.maximum(floor, scaled_of(bound))
            if use_kept != 0:
                bound = tl.full((), ALL_ORDERS, tl.int64)
                if top_p < 1.0:
                    bound = search(
                        values, kept, count, use_kept, peak, temperature, floor,
                        top_p * total.to(tl.float64), True, LANES // 4,
                    )  # fmt: skip
                token = _draw_kept(kept, kept_ids, count, floor, bound, key, LANES // 4)
        if use_kept == 0:
            token = _draw_open(
                values, kept, kept_ids, counter, vocab, key, peaks, bounds, has_bounds, peak,
                temperature, floor, top_p, total, CANDIDATES, LANES, GROUP,
            )  # fmt: skip
    return token


@triton.jit
def _choose(
    logits, row_stride, seen, edit_ids, edits, edit_ends, slots, output_indices, mixed_seeds,
    temperatures, top_ps, log_min_ps, top_ks, repetitions, frequencies, presences,
    all_kept, all_kept_ids, counters, out, vocab,
    IS_GREEDY: tl.constexpr, NUM_EDITS: tl.constexpr, EDIT_ROOM: tl.constexpr,
    CANDIDATES: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    output_index = tl.load(output_indices + row)
    values = logits + row * row_stride
    first_edit = slot * NUM_EDITS
    _edit(
        values, edit_ids + first_edit, edits + first_edit, edit_ends + first_edit, output_index,
        NUM_EDITS, EDIT_ROOM,
    )  # fmt: skip
    if IS_GREEDY:
        tl.store(out + row, _argmax(values, vocab, LANES).to(tl.int64))
    else:
        seen += slot * vocab
        repetition = tl.load(repetitions + row)
        frequency = tl.load(frequencies + row)
        presence = tl.load(presences + row)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            _penalise(values, seen, vocab, repetition, frequency, presence, LANES)
        temperature = tl.load(temperatures + row)
        if temperature == 0.0:
            token = _argmax(values, vocab, LANES)
        else:
            token = _sample(
                values, all_kept + row * CANDIDATES, all_kept_ids + row * CANDIDATES,
                counters + row, vocab, row_key(tl.load(mixed_seeds + row), output_index),
                tl.maximum(temperature, 1e-30),
                tl.maximum(tl.load(top_ps + row), 1e-10).to(tl.float64),
                tl.load(log_min_ps + row), tl.load(top_ks + row), CANDIDATES, LANES, GROUP,
            )  # fmt: skip
        tl.store(out + row, token.to(tl.int64))
        tl.atomic_add(seen + token, 2, sem="relaxed")


def choose_tokens(
    values: Tensor, seen: Tensor, edits: tuple[Tensor, Tensor, Tensor], *,
    slot: Tensor, output_index: Tensor, mixed_seed: Tensor, temperature: Tensor, top_p: Tensor,
    min_p: Tensor, top_k: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor,
    is_greedy: bool,
) -> Tensor:  # fmt: skip
    """Return the chosen tokens, [B] int64, and count them in `seen`.

    Args:
        values: [B, V] float32 logits with unit stride along V; changed.
        seen: [S, V] int32 contiguous, twice the count among the output, plus one if in the prompt.
        edits: [S, E] each and contiguous: tokens int64, what to add to their logits float32, and
            the output index int64 from which on no more.
        slot: [B] int64, the row of the tables of each row.
        output_index: [B] int64.
        mixed_seed: [B] int64, see `engine.sampling.noise`.
        temperature: [B] float32; 0 is greedy.
        top_p: [B] float32.
        min_p: [B] float32.
        top_k: [B] int64; V or more is off.
        repetition: [B] float32.
        frequency: [B] float32.
        presence: [B] float32.
        is_greedy: all rows are, and none has penalties; nothing is counted.
    """
    num_rows, vocab = values.shape
    num_edits = edits[0].shape[1]
    tables = (seen, *edits)
    require(
        values.stride(1) == 1 and all(table.is_contiguous() for table in tables),
        "logits and tables",
        [table.stride() for table in (values, *tables)],
        "no gaps are wanted",
    )
    require(
        [table.shape[1] for table in tables] == [vocab, num_edits, num_edits, num_edits]
        and slot.shape == (num_rows,),
        "logits and tables",
        [tuple(table.shape) for table in (values, *tables, slot)],
        "as wide as the vocabulary, or as the edits, and a slot a row are wanted",
    )
    out = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    kept = torch.empty((num_rows, CANDIDATES), dtype=torch.float32, device=values.device)
    kept_ids = torch.empty((num_rows, CANDIDATES), dtype=torch.int32, device=values.device)
    counters = torch.empty(num_rows, dtype=torch.int32, device=values.device)
    num_warps = 32 if num_rows <= FEW_ROWS else 16
    lanes = 256 * num_warps
    # At most 64 registers: all that an SM has for 32 warps.
    _choose[(num_rows,)](
        values, values.stride(0), seen, *edits, slot, output_index, mixed_seed, temperature, top_p,
        min_p.log(), top_k, repetition, frequency, presence, kept, kept_ids, counters, out,
        vocab,
        IS_GREEDY=is_greedy, NUM_EDITS=num_edits, EDIT_ROOM=triton.next_power_of_2(num_edits),
        CANDIDATES=CANDIDATES, LANES=lanes, GROUP=triton.next_power_of_2(triton.cdiv(vocab, lanes)),
        num_warps=num_warps, maxnreg=64,
    )  # fmt: skip
    return out
