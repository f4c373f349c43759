"""Random numbers without a generator: noise as a pure function of (seed, output index, token id).

A generator has state, and state makes a request's tokens depend on what else was in its batches, on
preemption and on which worker ran which step. A hash of the coordinates has none: token i of a
request draws the same noise on prefill and on decode, in any batch, on any device (integer
arithmetic is exact everywhere; only the final logarithms may differ in the last bit).

Adding Gumbel noise to logits and taking the argmax samples from their softmax (the Gumbel-max
trick), so sampling needs no cumulative sums. The hash is the finaliser of SplitMix64 (Steele, Lea,
Flood, 2014), over 64-bit words whose products wrap.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.host_copy import upload

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_UNIFORM_BITS = 40
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def row_key(seed: int, output_index: int) -> int:
    """Return the signed 64-bit key of one row of noise.

    Args:
        seed: unsigned 64 bits.
        output_index: index of the token among the request's output tokens.
    """
    mixed = _mix_int((seed + _WEYL) & _MASK)
    return _to_signed(_mix_int((mixed + (output_index + 1) * _WEYL) & _MASK))


def mix_seed(seed: int) -> int:
    """Return the part of `row_key` that all tokens of a request share, as a signed number."""
    return _to_signed(_mix_int((seed + _WEYL) & _MASK))


def row_keys(mixed_seeds: torch.Tensor, output_indices: torch.Tensor) -> torch.Tensor:
    """Return `row_key` of each row, computed where its arguments are.

    Args:
        mixed_seeds: [R] int64, each of `mix_seed`.
        output_indices: [R] int64.
    """
    return _mix_tensor(mixed_seeds + (output_indices + 1) * _to_signed(_WEYL))


def uniform(
    keys: Sequence[int] | torch.Tensor, vocab_size: int, device: torch.device | str
) -> torch.Tensor:
    """Return [len(keys), vocab_size] float32 in (0, 1), fine-grained near 0 (steps of 2**-40).

    Args:
        keys: one `row_key` per row; a tensor of them is [R] int64 on `device`.
        vocab_size: number of columns; column v depends on its row's key and v alone.
        device: where to compute.
    """
    columns = torch.arange(vocab_size, dtype=torch.int64, device=device) * _to_signed(_WEYL)
    if isinstance(keys, torch.Tensor):
        rows = keys
    else:
        (rows,) = upload([np.array(keys, dtype=np.int64)], device)
    bits = _mix_tensor(rows[:, None] + columns)
    top = _shift_right(bits, 64 - _UNIFORM_BITS)
    return ((top.to(torch.float32) + 0.5) * 2.0**-_UNIFORM_BITS).clamp_(max=_LARGEST_BELOW_ONE)


def gumbel(
    keys: Sequence[int] | torch.Tensor, vocab_size: int, device: torch.device | str
) -> torch.Tensor:
    """Return standard Gumbel noise [len(keys), vocab_size] float32; arguments as `uniform`.

    It is -log(E) with E = -log(1 - u) exponential. The winners are the smallest E, and those come
    from small u, where float32 and the hash are finest.
    """
    exponential = uniform(keys, vocab_size, device).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _mix_int(word: int) -> int:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        word = ((word ^ (word >> shift)) * multiplier) & _MASK
    return word ^ (word >> _SHIFTS[-1])


def _mix_tensor(words: torch.Tensor) -> torch.Tensor:
    """Do `_mix_int` on each int64 element, in place."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        words.bitwise_xor_(_shift_right(words, shift)).mul_(_to_signed(multiplier))
    return words.bitwise_xor_(_shift_right(words, _SHIFTS[-1]))


def _shift_right(words: torch.Tensor, shift: int) -> torch.Tensor:
    # int64 shifts bring in the sign; the mask turns that into a logical shift.
    return (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _to_signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
