"""Cutting off unlikely tokens: min-p, top-k, top-p.

All three keep the tokens whose scaled logit reaches a threshold of their row, so tokens with equal
logits are kept or dropped together, and the result does not depend on the order in which a sort
happens to leave equals, nor on what else is in the batch. Scaled logits have their maximum at 0
and a dropped token is -inf. Masses are sums of whole numbers, so that the order of a sum, which
differs between devices and between kernels, changes no threshold.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.host_copy import upload
from runtime.sampling import SamplingParams

SMALLEST_TOP_P = 1e-10
"""What a smaller top_p becomes, so that 0 keeps the best token."""

WEIGHT_BITS = 42
"""Weights are whole numbers of 2**-42; those of 2**21 tokens at most add up in 64 bits."""


def apply_min_p(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Drop tokens less likely than min_p times the most likely one, in place.

    Args:
        scaled: [R, V] float32, maximum of each row 0, so that a logit is a log of that ratio.
        params: one per row.
    """
    if any(item.min_p > 0.0 for item in params):
        (min_p,) = upload([np.array([item.min_p for item in params], np.float32)], scaled.device)
        scaled.masked_fill_(scaled < min_p.log()[:, None], -torch.inf)


def apply_top_k_top_p(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Keep the top_k best tokens, then of these the fewest that hold top_p of the mass, in place.

    Rows with a top_k need only their best tokens; rows with only a top_p need all in order; rows
    with neither are left alone.

    Args:
        scaled: [R, V] float32, maximum of each row 0.
        params: one per row.
    """
    vocab_size = scaled.shape[1]
    with_k = [row for row, item in enumerate(params) if 0 < item.top_k < vocab_size]
    only_p = [
        row
        for row, item in enumerate(params)
        if item.top_p < 1.0 and not 0 < item.top_k < vocab_size
    ]
    if with_k:
        _keep_best(scaled, with_k, params, max(params[row].top_k for row in with_k))
    if only_p:
        _keep_best(scaled, only_p, params, vocab_size)


def _keep_best(
    scaled: torch.Tensor, rows: list[int], params: Sequence[SamplingParams], width: int
) -> None:
    """Truncate `rows`, none of which keeps more than its `width` best tokens, in place."""
    index, top_k, top_p = upload(
        [
            np.array(rows, dtype=np.int64),
            np.array([params[row].top_k or width for row in rows], dtype=np.int64),
            np.array([max(params[row].top_p, SMALLEST_TOP_P) for row in rows], dtype=np.float32),
        ],
        scaled.device,
    )
    values = scaled[index]
    if width < scaled.shape[1]:
        best = values.topk(width, dim=-1).values
    else:
        best = values.sort(dim=-1, descending=True).values
    threshold = keep_threshold(best, top_k, top_p)
    scaled[index] = values.masked_fill_(values < threshold[:, None], -torch.inf)


def keep_threshold(best: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the smallest logit that each row keeps, [R].

    Args:
        best: [R, W] the W best scaled logits of each row, falling, first one 0.
        top_k: [R] int64; values above W keep all W.
        top_p: [R] float32; 1 keeps all.
    """
    places = torch.arange(best.shape[1], device=best.device)
    weights = best.double().exp_().mul_(2.0**WEIGHT_BITS).add_(0.5).long()
    weights.masked_fill_(places >= top_k[:, None], 0)
    mass = weights.cumsum(dim=-1)
    target = top_p[:, None].double() * mass[:, -1:].double()
    keep = ((mass - weights).double() < target) & (places < top_k[:, None])
    # The mass before a rare token, whose own is rounded to 0, is the total: top_p = 1 keeps it.
    keep |= (top_p[:, None] >= 1.0) & (places < top_k[:, None])
    # A row with NaN keeps nothing; its token does not matter, but the index has to exist.
    last = (keep.sum(dim=-1, keepdim=True) - 1).clamp_min_(0)
    return best.gather(-1, last)[:, 0]
