"""The noise of a row on the device, and the race that it decides, without looking at every draw.

The noise is that of `engine.sampling.noise`, to the last bit: a hash of 64 bits, then two
logarithms. The hash is needed for all tokens, the logarithms are not: -log(u) bounds the noise from
above, and the bits of the hash's upper half, as a float, bound that, to within 6 %. A row is
divided among *lanes* (token t belongs to lane t mod LANES), of which a first reading keeps the
largest bound. The best token is then found best lane first: a lane's tokens are drawn exactly, and
what no bound of another lane reaches has won; one to three lanes of some thousand, as a rule.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MOST_NOISE = tl.constexpr(41.5)
"""In units of log(2): the smallest uniform number is 2**-41."""
MARGIN = tl.constexpr(1e-3)
"""Likewise: above the rounding of a bound of what can win, which is within 2**6 of the peak."""


@triton.jit
def _mix(bits):
    """Return the hash of int64 words, as uint64."""
    bits = bits.to(tl.uint64, bitcast=True)
    bits = (bits ^ (bits >> 30)) * tl.full((), -4658895280553007687, tl.int64).to(
        tl.uint64, bitcast=True
    )
    bits = (bits ^ (bits >> 27)) * tl.full((), -7723592293110705685, tl.int64).to(
        tl.uint64, bitcast=True
    )
    return bits ^ (bits >> 31)


@triton.jit
def _step(columns):
    """Return what tells neighbours apart before they are mixed."""
    return columns.to(tl.int64) * -7046029254386353131


@triton.jit
def row_key(mixed_seed, output_index):
    """Return the `row_key` of `engine.sampling.noise`, int64."""
    return _mix(mixed_seed + _step(output_index + 1)).to(tl.int64, bitcast=True)


@triton.jit
def gumbel(key, columns):
    """Return the noise; logarithms in float64, rounded once."""
    top = (_mix(key + _step(columns)) >> 24).to(tl.int64).to(tl.float32)
    uniform = tl.minimum((top + 0.5) * 9.094947017729282e-13, 0.99999994)
    u = uniform.to(tl.float64)
    # Near 0 the series keeps the bits that 1 - u would lose.
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    exponential = tl.where(u < 1e-4, series, -tl.log(1.0 - u)).to(tl.float32)
    return -tl.log(exponential.to(tl.float64)).to(tl.float32)


@triton.jit
def lane_peaks(values, vocab, LANES: tl.constexpr):
    """Return the largest logit of each lane, [LANES]."""
    peaks = tl.full((LANES,), float("-inf"), tl.float32)
    for start in range(0, vocab, LANES):
        offsets = start + tl.arange(0, LANES)
        value = tl.load(values + offsets, mask=offsets < vocab, other=float("-inf"))
        peaks = tl.maximum(peaks, value)
    return peaks


@triton.jit
def lane_bounds(values, vocab, key, scale, reference, least, LANES: tl.constexpr):
    """Return the largest logit, and the largest bound of logit and noise, of each lane.

    Bounds are of the logits from `least` on, relative to `reference`, in units of log(2); `scale`
    is log2(e) by the temperature.
    """
    peaks = tl.full((LANES,), float("-inf"), tl.float32)
    bounds = tl.full((LANES,), float("-inf"), tl.float32)
    for start in range(0, vocab, LANES):
        offsets = start + tl.arange(0, LANES)
        value = tl.load(values + offsets, mask=offsets < vocab, other=float("-inf"))
        upper = (_mix(key + _step(offsets)) >> 32).to(tl.uint32).to(tl.float32)
        # The bits of 2**e * (1 + m) read as 2**23 * (e + m + 127), and log2(1 + m) is at least m.
        log_upper = upper.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07
        bound = ((value - reference) * scale + 159.0) - log_upper
        peaks = tl.maximum(peaks, value)
        bounds = tl.maximum(bounds, tl.where(value >= least, bound, float("-inf")))
    return peaks, bounds


@triton.jit
def first_of_race(
    values, vocab, key, peaks, bounds, peak, temperature, scale, floor,
    LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the token with the largest sum of scaled logit and noise, the first of equals.

    Only scaled logits from `floor` on take part; `bounds` are relative to the peak. Also returns
    the scaled logit of the token.
    """
    lanes = tl.arange(0, LANES)
    reach = tl.minimum(bounds, (peaks - peak) * scale + MOST_NOISE) + MARGIN
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.zeros((), tl.int32)
    pivot = tl.zeros((), tl.float32)
    top, lane = tl.max(reach, axis=0, return_indices=True)
    while (top > float("-inf")) & (top >= best * LOG2E):
        offsets = lane + tl.arange(0, GROUP) * LANES
        value = tl.load(values + offsets, mask=offsets < vocab, other=float("-inf"))
        scaled = tl.div_rn(value - peak, temperature)
        takes_part = (offsets < vocab) & (scaled >= floor)
        noisy = tl.where(takes_part, scaled + gumbel(key, offsets), float("-inf"))
        lane_best = tl.max(noisy, axis=0)
        winner = tl.min(tl.where(takes_part & (noisy == lane_best), offsets, vocab), axis=0)
        is_better = (lane_best > best) | ((lane_best == best) & (winner < token))
        winning = tl.max(tl.where(offsets == winner, scaled, float("-inf")), axis=0)
        pivot = tl.where(is_better, winning, pivot)
        token = tl.where(is_better, winner, token)
        best = tl.where(is_better, lane_best, best)
        reach = tl.where(lanes == lane, float("-inf"), reach)
        top, lane = tl.max(reach, axis=0, return_indices=True)
    return token, pivot
