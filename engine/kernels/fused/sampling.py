"""One row of logits to one token, in one program: penalties, truncation, noise, argmax.

What `GraphSampler` writes as a dozen operations over [B, V], here read three times. The key idea is
that a truncated row needs no sort. Every token that survives a top_p below 1 has a weight above
(1 - top_p) / V of the best one's, so the row is cut to these candidates first, normally some
hundreds. Among them the threshold is searched in the integers: a scaled logit is at most 0, so the
bits of its magnitude order it, and counts and masses below a bound are sums. A row that has too
many candidates, or fewer than its top_k, is searched whole. Sums are in float64, like the running
sums of the sorting sampler: their order changes no token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CANDIDATES = 8192
"""Room for the candidates of a row; more are not set apart."""
BLOCK = 4096


@triton.jit
def _scaled(values, kept, offsets, mask, use_kept, peak, temperature):
    """Load scaled logits from the candidates or from the whole row."""
    whole = tl.load(values + offsets, mask=mask & (use_kept == 0), other=float("-inf"))
    candidates = tl.load(kept + offsets, mask=mask & (use_kept != 0), other=float("-inf"))
    return tl.where(use_kept != 0, candidates, tl.div_rn(whole - peak, temperature))


@triton.jit
def _order(scaled):
    """Return integers that grow as the scaled logits fall from 0 to -infinity."""
    return tl.abs(scaled).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _weight(scaled):
    """Return exp as the nearest float32, in float64."""
    return tl.exp(scaled.to(tl.float64)).to(tl.float32).to(tl.float64)


@triton.jit
def _search(
    values, kept, count, use_kept, peak, temperature, floor, target,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest bound such that what is ordered below it sums to less than `target`."""
    bound = tl.zeros((), tl.int64)
    for digit in range(16):
        shift = 30 - 2 * digit
        one = bound + (tl.full((), 1, tl.int64) << shift)
        two = bound + (tl.full((), 2, tl.int64) << shift)
        three = bound + (tl.full((), 3, tl.int64) << shift)
        sum_one = tl.zeros((), tl.float64)
        sum_two = tl.zeros((), tl.float64)
        sum_three = tl.zeros((), tl.float64)
        for start in range(0, count, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < count
            scaled = _scaled(values, kept, offsets, mask, use_kept, peak, temperature)
            order = _order(scaled)
            amount = _weight(scaled) if BY_MASS else tl.full((BLOCK,), 1.0, tl.float64)
            amount = tl.where(mask & (scaled >= floor), amount, 0.0)
            sum_one += tl.sum(tl.where(order < one, amount, 0.0), axis=0)
            sum_two += tl.sum(tl.where(order < two, amount, 0.0), axis=0)
            sum_three += tl.sum(tl.where(order < three, amount, 0.0), axis=0)
        passed = (sum_one < target).to(tl.int64) + (sum_two < target).to(tl.int64)
        passed += (sum_three < target).to(tl.int64)
        bound += passed << shift
    return bound


@triton.jit
def _mass_of_best(
    values, kept, count, use_kept, peak, temperature, floor, bound, top_k, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the mass of the `top_k` best, `bound` being the order of the last of them."""
    mass = tl.zeros((), tl.float64)
    number = tl.zeros((), tl.float64)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        scaled = _scaled(values, kept, offsets, mask, use_kept, peak, temperature)
        is_below = mask & (scaled >= floor) & (_order(scaled) < bound)
        mass += tl.sum(tl.where(is_below, _weight(scaled), 0.0), axis=0)
        number += tl.sum(tl.where(is_below, 1.0, 0.0).to(tl.float64), axis=0)
    is_number = bound <= 0x7F800000
    last = -tl.where(is_number, bound, 0x7F800000).to(tl.int32).to(tl.float32, bitcast=True)
    return mass + tl.maximum(top_k - number, 0.0) * _weight(last)


@triton.jit
def _gumbel(key, columns):
    """Return the noise of `engine.sampling.noise`; logarithms in float64, rounded once."""
    bits = (key + columns.to(tl.int64) * -7046029254386353131).to(tl.uint64, bitcast=True)
    bits = (bits ^ (bits >> 30)) * tl.full((), -4658895280553007687, tl.int64).to(
        tl.uint64, bitcast=True
    )
    bits = (bits ^ (bits >> 27)) * tl.full((), -7723592293110705685, tl.int64).to(
        tl.uint64, bitcast=True
    )
    bits = bits ^ (bits >> 31)
    top = (bits >> 24).to(tl.int64).to(tl.float32)
    uniform = tl.minimum((top + 0.5) * 9.094947017729282e-13, 0.99999994)
    u = uniform.to(tl.float64)
    # Near 0 the series keeps the bits that 1 - u would lose.
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    exponential = tl.where(u < 1e-4, series, -tl.log(1.0 - u)).to(tl.float32)
    return -tl.log(exponential.to(tl.float64)).to(tl.float32)


@triton.jit
def _penalise(values, seen, vocab, repetition, frequency, presence, BLOCK: tl.constexpr):
    """Change the row in place; return its maximum and where it is first."""
    is_penalised = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    peak = tl.full((), float("-inf"), tl.float32)
    place = tl.zeros((), tl.int32)
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < vocab
        value = tl.load(values + offsets, mask=mask, other=float("-inf"))
        if is_penalised:
            entry = tl.load(seen + offsets, mask=mask, other=0)
            number = (entry >> 1).to(tl.float32)
            in_output = (entry > 1).to(tl.float32)
            repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
            value = tl.where(entry > 0, repeated, value)
            value = value - frequency * number - presence * in_output
            tl.store(values + offsets, value, mask=mask)
        best, where = tl.max(value, axis=0, return_indices=True)
        is_better = best > peak
        peak = tl.where(is_better, best, peak)
        place = tl.where(is_better, start + where, place)
    return peak, place


@triton.jit
def _set_apart(
    values, kept, kept_ids, vocab, peak, temperature, least, floor,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy what reaches `least`; return how many that is, and the mass of all above `floor`."""
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.float64)
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < vocab
        value = tl.load(values + offsets, mask=mask, other=float("-inf"))
        scaled = tl.div_rn(value - peak, temperature)
        mass += tl.sum(tl.where(mask & (scaled >= floor), _weight(scaled), 0.0), axis=0)
        chosen = mask & (scaled >= least)
        flags = chosen.to(tl.int32)
        places = count + tl.cumsum(flags, axis=0) - flags
        has_room = chosen & (places < CANDIDATES)
        tl.store(kept + places, scaled, mask=has_room)
        tl.store(kept_ids + places, offsets, mask=has_room)
        count += tl.sum(flags, axis=0)
    return count, mass


@triton.jit
def _draw(
    values, kept, kept_ids, count, use_kept, peak, temperature, floor, bound, key,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the token with the largest sum of scaled logit and noise, the first of equals."""
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        scaled = _scaled(values, kept, offsets, mask, use_kept, peak, temperature)
        ids = tl.load(kept_ids + offsets, mask=mask & (use_kept != 0), other=0)
        ids = tl.where(use_kept != 0, ids, offsets)
        is_kept = mask & (scaled >= floor) & (_order(scaled) <= bound)
        noisy = tl.where(is_kept, scaled + _gumbel(key, ids), float("-inf"))
        block_best, where = tl.max(noisy, axis=0, return_indices=True)
        winner = tl.sum(tl.where(tl.arange(0, BLOCK) == where, ids, 0), axis=0)
        token = tl.where(block_best > best, winner, token)
        best = tl.maximum(best, block_best)
    return token


@triton.jit
def _choose(
    logits, row_stride, seen, slots, temperatures, top_ps, log_min_ps, top_ks, repetitions,
    frequencies, presences, keys, all_kept, all_kept_ids, out, vocab,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * row_stride
    kept = all_kept + row * CANDIDATES
    kept_ids = all_kept_ids + row * CANDIDATES
    peak, token = _penalise(
        values, seen + tl.load(slots + row) * vocab, vocab, tl.load(repetitions + row),
        tl.load(frequencies + row), tl.load(presences + row), BLOCK,
    )  # fmt: skip
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        tl.debug_barrier()  # what a thread has changed, others read
        temperature = tl.maximum(temperature, 1e-30)
        top_p = tl.load(top_ps + row).to(tl.float64)
        top_k = tl.load(top_ks + row)
        floor = tl.load(log_min_ps + row)
        count = vocab
        use_kept = tl.zeros((), tl.int32)
        bound = tl.full((), 0x7FFFFFFF, tl.int64)
        if (top_p < 1.0) | (top_k < vocab) | (floor > float("-inf")):
            # Beyond rounding; with a top_k alone, a guess that is checked below.
            spread = tl.log(tl.maximum(1.0 - top_p, 1e-30) / vocab).to(tl.float32) - 0.01
            guess = tl.where(top_k < vocab, -25.0, float("-inf"))
            least = tl.maximum(floor, tl.where(top_p < 1.0, spread, guess))
            number, mass = _set_apart(
                values, kept, kept_ids, vocab, peak, temperature, least, floor, CANDIDATES, BLOCK
            )
            tl.debug_barrier()
            holds_best = (top_k >= vocab) | (number >= top_k) | (least == floor)
            if (number <= CANDIDATES) & holds_best:
                use_kept = tl.full((), 1, tl.int32)
                count = number
            if top_k < vocab:
                bound = _search(
                    values, kept, count, use_kept, peak, temperature, floor,
                    top_k.to(tl.float64), False, BLOCK,
                )  # fmt: skip
                mass = _mass_of_best(
                    values, kept, count, use_kept, peak, temperature, floor, bound,
                    top_k.to(tl.float64), BLOCK,
                )  # fmt: skip
            if top_p < 1.0:
                by_mass = _search(
                    values, kept, count, use_kept, peak, temperature, floor,
                    tl.maximum(top_p, 1e-10) * mass, True, BLOCK,
                )  # fmt: skip
                bound = tl.minimum(bound, by_mass)
        token = _draw(
            values, kept, kept_ids, count, use_kept, peak, temperature, floor, bound,
            tl.load(keys + row), BLOCK,
        )  # fmt: skip
    tl.store(out + row, token.to(tl.int64))


def choose_tokens(
    values: Tensor, seen: Tensor, slots: Tensor, keys: Tensor, *,
    temperature: Tensor, top_p: Tensor, min_p: Tensor, top_k: Tensor,
    repetition: Tensor, frequency: Tensor, presence: Tensor,
) -> Tensor:  # fmt: skip
    """Return the chosen tokens, [B] int64.

    Args:
        values: [B, V] float32 logits with unit stride along V; penalised in place.
        seen: [*, V] int32 contiguous, twice the count among the output, plus one if in the prompt.
        slots: [B] int64, the row of `seen` of each row.
        keys: [B] int64, `row_key`s.
        temperature: [B] float32; 0 is greedy.
        top_p: [B] float32.
        min_p: [B] float32.
        top_k: [B] int64; V or more is off.
        repetition: [B] float32.
        frequency: [B] float32.
        presence: [B] float32.
    """
    num_rows, vocab = values.shape
    assert values.stride(1) == 1
    assert seen.is_contiguous()
    out = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    kept = torch.empty((num_rows, CANDIDATES), dtype=torch.float32, device=values.device)
    kept_ids = torch.empty((num_rows, CANDIDATES), dtype=torch.int32, device=values.device)
    _choose[(num_rows,)](
        values, values.stride(0), seen, slots, temperature, top_p, min_p.log(), top_k, repetition,
        frequency, presence, keys, kept, kept_ids, out, vocab,
        CANDIDATES=CANDIDATES, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return out
