"""Invented weights: a model of the right shape that needs no checkpoint.

For benchmarks and start-up tests. The key idea: each checkpoint tensor is drawn whole from a
generator seeded by its name, and the rank keeps its slice; so the model is the same however many
ranks share it, and two runs agree. Scales keep activations near unit variance, and gate weights are
drawn alike for every expert, so routing is balanced in the mean.
"""

import math
from itertools import groupby
from zlib import crc32

import torch
from torch import Tensor

from engine.weights.loader import LoadableModel, ProgressCallback


@torch.no_grad()
def fill_with_dummy_weights(
    model: LoadableModel, *, seed: int = 0, progress: ProgressCallback | None = None
) -> None:
    """Fill every parameter of this rank.

    Args:
        model: with uninitialised parameters.
        seed: of the whole model.
        progress: told about bytes, as in a load.
    """
    slices = [part for part in model.weight_slices() if part.destination is not None]
    total = sum(part.destination.nbytes for part in slices if part.destination is not None)
    done = 0
    # Replicas of one expert are neighbours in the plan: drawn once, copied to each.
    for (name, shape), parts in groupby(slices, key=lambda part: (part.name, part.full_shape)):
        full = None
        for part in parts:
            assert part.destination is not None
            if full is None:
                full = _draw(name, shape, seed, part.destination.device)
            window = tuple(slice(start, end) for start, end in part.ranges)
            part.rule.draw(full[window], part)
            done += part.destination.nbytes
            if progress is not None:
                progress(done, total)


def _draw(name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(shape, device=device)
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device=device).manual_seed(crc32(name.encode(), seed))
    # Variance 1 / inputs keeps a product at the variance of its input; embeddings have unit rows.
    return torch.randn(shape, generator=generator, device=device) / math.sqrt(shape[-1])
