"""Muon: momentum whose update is orthogonalised, for the matrices of the hidden layers.

Embeddings, heads, routers and norms do not belong here; they take AdamW. `torch.optim.Muon` does
the same for single matrices; ours exists because experts are stacks of matrices, and because it
orthogonalises all matrices of one shape in one batch, which makes a step of 300 small matrices
cheap. Update rule and coefficients: Jordan et al., "Muon", 2024; the scale that lets it share the
learning rate of AdamW: Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_STEPS: Final = 5


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum with decoupled weight decay."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        """Group parameters by the shape of their matrices.

        Args:
            parameters: each [M, K], or [num_matrices, M, K].
            lr: learning rate per step, comparable to that of AdamW.
            momentum: decay of the running gradient; Nesterov.
            weight_decay: share of a weight that a step at `lr` 1 would remove.
        """
        by_shape: defaultdict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[tuple(parameter.shape[-2:])].append(parameter)
        groups = [{"params": group} for group in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter; all must have a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = group["params"]
            gradient = torch.cat([_matrices(parameter.grad) for parameter in parameters])
            state = self.state[parameters[0]]
            if not state:
                state["momentum"] = torch.zeros_like(gradient)
            state["momentum"].lerp_(gradient, 1 - group["momentum"])
            direction = orthogonalise(gradient.lerp(state["momentum"], group["momentum"]))
            rate = group["lr"] * 0.2 * max(gradient.shape[-2:]) ** 0.5
            sizes = [len(_matrices(parameter)) for parameter in parameters]
            for parameter, update in zip(parameters, torch.split(direction, sizes), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.view_as(parameter), alpha=-rate)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return, for [N, M, K], matrices with the same singular vectors and values near 1.

    Runs a quintic Newton-Schulz iteration in bfloat16; values end between about 0.7 and 1.2.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result.to(matrices.dtype)


def _matrices(tensor: Tensor | None) -> Tensor:
    """View a parameter or gradient as [num_matrices, M, K]."""
    assert tensor is not None
    return tensor if tensor.dim() == 3 else tensor[None]
