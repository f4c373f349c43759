"""Sums over the scaled logits of a row that decide which tokens a truncation keeps.

Formulas are those of `engine.sampling.truncation`. A scaled logit is at most 0, so the bits of its
magnitude order it, and a threshold is found in the integers: counts and masses below a bound are
sums. Weights are whole numbers of 2**-42, so the order of a sum changes nothing.

A row's *candidates* are scaled logits set apart with their tokens; what works on candidates also
works on the whole row, with `use_kept` 0 and the vocabulary's size as their number.
"""

import triton
import triton.language as tl

ALL_ORDERS = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def load_scaled(values, kept, offsets, mask, use_kept, peak, temperature):
    """Load scaled logits from the candidates or from the whole row."""
    whole = tl.load(values + offsets, mask=mask & (use_kept == 0), other=float("-inf"))
    candidates = tl.load(kept + offsets, mask=mask & (use_kept != 0), other=float("-inf"))
    return tl.where(use_kept != 0, candidates, tl.div_rn(whole - peak, temperature))


@triton.jit
def order_of(scaled):
    """Return integers that grow as the scaled logits fall from 0 to -infinity."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def scaled_of(order):
    """Return the scaled logit of an order, -infinity for those beyond."""
    return -tl.minimum(order, INFINITE).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(scaled):
    """Return exp in whole numbers of 2**-42, int64."""
    return (tl.exp(scaled.to(tl.float64)) * 4398046511104.0 + 0.5).to(tl.int64)


@triton.jit
def search(
    values, kept, count, use_kept, peak, temperature, floor, target,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest bound such that what is ordered below it sums to less than `target`."""
    bound = tl.zeros((), tl.int64)
    for digit in range(16):
        shift = 30 - 2 * digit
        unit = tl.full((), 1, tl.int64) << shift
        sum_one = tl.zeros((BLOCK,), tl.int64)
        sum_two = tl.zeros((BLOCK,), tl.int64)
        sum_three = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, count, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < count
            scaled = load_scaled(values, kept, offsets, mask, use_kept, peak, temperature)
            order = order_of(scaled).to(tl.int64)
            amount = weight_of(scaled) if BY_MASS else tl.full((BLOCK,), 1, tl.int64)
            amount = tl.where(mask & (scaled >= floor), amount, 0)
            sum_one += tl.where(order < bound + unit, amount, 0)
            sum_two += tl.where(order < bound + 2 * unit, amount, 0)
            sum_three += tl.where(order < bound + 3 * unit, amount, 0)
        passed = (tl.sum(sum_one, axis=0).to(tl.float64) < target).to(tl.int64)
        passed += (tl.sum(sum_two, axis=0).to(tl.float64) < target).to(tl.int64)
        passed += (tl.sum(sum_three, axis=0).to(tl.float64) < target).to(tl.int64)
        bound += passed << shift
    return bound


@triton.jit
def least_of_best(peaks, peak, temperature, top_k, LANES: tl.constexpr):
    """Return a scaled logit that at least `top_k` of the lanes' peaks reach, as large as is easy.

    As many tokens of the row reach it, so all of its `top_k` best ones do; -infinity if the lanes
    are too few to tell.
    """
    scaled = tl.div_rn(peaks - peak, temperature)
    orders = order_of(scaled)
    prefix = tl.zeros((), tl.int32)
    for digit in range(18):
        tried = prefix + (1 << (30 - digit))
        is_below = (orders < tried).to(tl.int32)
        prefix = tl.where(tl.sum(is_below, axis=0) < top_k, tried, prefix)
    return tl.where(top_k > LANES, float("-inf"), scaled_of(prefix + 0x1FFF))


@triton.jit
def mass_of_best(
    values, kept, count, use_kept, peak, temperature, floor, bound, top_k, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the mass of the `top_k` best, `bound` being the order of the last of them."""
    mass = tl.zeros((BLOCK,), tl.int64)
    number = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < count
        scaled = load_scaled(values, kept, offsets, mask, use_kept, peak, temperature)
        is_below = mask & (scaled >= floor) & (order_of(scaled) < bound)
        mass += tl.where(is_below, weight_of(scaled), 0)
        number += is_below.to(tl.int64)
    missing = tl.maximum(top_k - tl.sum(number, axis=0), 0)
    return tl.sum(mass, axis=0) + missing * weight_of(scaled_of(bound))


@triton.jit
def masses(values, vocab, peak, temperature, floor, pivot, BLOCK: tl.constexpr):
    """Return the mass from `floor` on, and the mass and the number of what exceeds `pivot`."""
    mass = tl.zeros((BLOCK,), tl.int64)
    mass_above = tl.zeros((BLOCK,), tl.int64)
    number_above = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < vocab
        value = tl.load(values + offsets, mask=mask, other=float("-inf"))
        scaled = tl.div_rn(value - peak, temperature)
        weight = tl.where(mask & (scaled >= floor), weight_of(scaled), 0)
        is_above = mask & (scaled > pivot)
        mass += weight
        mass_above += tl.where(is_above, weight, 0)
        number_above += is_above.to(tl.int32)
    return tl.sum(mass, axis=0), tl.sum(mass_above, axis=0), tl.sum(number_above, axis=0)


@triton.jit
def rough_masses(values, vocab, peak, temperature, floor, pivot, BLOCK: tl.constexpr):
    """Return what `masses` does, the masses as float32, 1 for the best token, to within 1e-5."""
    mass = tl.zeros((BLOCK,), tl.float32)
    mass_above = tl.zeros((BLOCK,), tl.float32)
    number_above = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(values + offsets, mask=offsets < vocab, other=float("-inf"))
        scaled = tl.div_rn(value - peak, temperature)
        weight = tl.where(scaled >= floor, tl.exp(scaled), 0.0)
        is_above = scaled > pivot
        mass += weight
        mass_above += tl.where(is_above, weight, 0.0)
        number_above += is_above.to(tl.int32)
    return tl.sum(mass, axis=0), tl.sum(mass_above, axis=0), tl.sum(number_above, axis=0)


@triton.jit
def judge(
    values, vocab, peak, temperature, floor, pivot, top_p, total, few, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return whether a top_p drops a token of scaled logit `pivot`, the total, and what exceeds it.

    It does if what exceeds the pivot has top_p of the total, which is the mass from `floor` on if
    it is given as 0. Sums are exact where rough ones leave doubt; and if no more than a `few`
    exceed a dropped token, whoever searches these needs the total.
    """
    mass, above, number = rough_masses(values, vocab, peak, temperature, floor, pivot, BLOCK)
    rough_total = tl.where(total == 0, mass, (total.to(tl.float64) * 2.0**-42).to(tl.float32))
    excess = above - top_p.to(tl.float32) * rough_total
    is_dropped = (excess >= 0.0).to(tl.int32)
    in_doubt = tl.abs(excess) <= 3e-5 * rough_total
    if in_doubt | ((is_dropped != 0) & (number <= few)):
        exact_mass, exact_above, number = masses(
            values, vocab, peak, temperature, floor, pivot, BLOCK
        )
        total = tl.where(total == 0, exact_mass, total)
        is_dropped = (exact_above.to(tl.float64) >= top_p * total.to(tl.float64)).to(tl.int32)
    return is_dropped, total, number


@triton.jit
def set_apart(
    values, kept, kept_ids, counter, vocab, peak, temperature, least,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy what reaches `least`, in any order and as far as there is room; return how many it is.

    `counter` is one int32 of scratch.
    """
    tl.atomic_xchg(counter, 0)
    tl.debug_barrier()
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < vocab
        value = tl.load(values + offsets, mask=mask, other=float("-inf"))
        scaled = tl.div_rn(value - peak, temperature)
        chosen = mask & (scaled >= least)
        counters = counter + tl.zeros((BLOCK,), tl.int32)
        places = tl.atomic_add(counters, 1, mask=chosen, sem="relaxed")
        has_room = chosen & (places < CANDIDATES)
        tl.store(kept + places, scaled, mask=has_room)
        tl.store(kept_ids + places, offsets, mask=has_room)
    tl.debug_barrier()  # what a thread has stored, others read
    return tl.atomic_add(counter, 0)
