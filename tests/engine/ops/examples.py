"""A call of every operation with random inputs, and what of its outcome has a meaning.

For tests that walk the table: an operation without an example is an error there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.reference import quantize_rows
from engine.kernels.rotation import Rotation
from engine.ops import activation, gate, latents, masked, norm, permute
from engine.ops.op import AnyOp

NUM_TOKENS, HIDDEN, NUM_EXPERTS, TOP_K = 5, 256, 8, 3
NUM_HEADS, NOPE, ROPE, RANK, Q_RANK = 4, 128, 64, 512, 128
MAX_ROWS = 128
RULE = gate.RoutingRule(
    top_k=TOP_K, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5
)


class Draw:
    """Random inputs of one example; the same seed draws the same."""

    def __init__(self, seed: int, device: torch.device, product_dtype: torch.dtype) -> None:
        """Take the dtype of what is multiplied: the interpreter multiplies bits of bfloat16."""
        self.device, self.product_dtype = device, product_dtype
        self._generator = torch.Generator().manual_seed(seed)

    def numbers(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)

    def ids(self) -> Tensor:
        scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=self._generator)
        return scores.topk(TOP_K).indices.to(self.device)

    def weights(self) -> Tensor:
        return torch.rand(NUM_TOKENS, TOP_K, generator=self._generator).to(self.device)

    def slots(self) -> Tensor:
        return torch.randperm(128, generator=self._generator)[:NUM_TOKENS].to(self.device)

    def rows(self) -> Fp8Rows:
        return quantize_rows(self.numbers(NUM_TOKENS, HIDDEN))

    def rotation(self) -> Rotation:
        angles = self.numbers(NUM_TOKENS, ROPE // 2, dtype=torch.float32)
        return Rotation(cos=angles.cos(), sin=angles.sin())


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One call.

    Attributes:
        draw: makes its arguments.
        look: from its result and arguments, all that must be equal; by default all tensors of both.
        is_exact: whether kernels give the same bits; otherwise numbers may be rounded differently.
    """

    draw: Callable[[Draw], Arguments]
    look: Callable[[Any, Arguments], list[Tensor]] = field(
        default=lambda result, arguments: tensors_of((result, arguments))
    )
    is_exact: bool = False

    def outcome(self, call: Callable[..., Any], draw: Draw) -> list[Tensor]:
        """Call it with fresh arguments."""
        args, kwargs = self.draw(draw)
        return self.look(call(*args, **kwargs), (args, kwargs))


def tensors_of(item: object) -> list[Tensor]:
    """Return all tensors in there; FP8 rows as numbers."""
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, Fp8Rows):
        return [item.dequantize()]
    if isinstance(item, Mapping):
        return [tensor for value in item.values() for tensor in tensors_of(value)]
    if isinstance(item, tuple | list):
        return [tensor for part in item for tensor in tensors_of(part)]
    if is_dataclass(item):
        return [t for each in fields(item) for t in tensors_of(getattr(item, each.name))]
    return []


def _aligned(draw: Draw) -> Arguments:
    return (draw.rows(), permute.moe_align_block_size(draw.ids(), 2, 4)), {}


def _aligned_in_use(out: Fp8Rows, arguments: Arguments) -> list[Tensor]:
    rows_TK = arguments[0][1].rows_TK
    return [out.dequantize()[rows_TK[rows_TK >= 0].long()]]


def _sums(draw: Draw) -> Arguments:
    places = permute.moe_align_block_size(draw.ids(), 2, 4)
    own = draw.numbers(NUM_TOKENS, HIDDEN)
    return (draw.numbers(places.num_rows, HIDDEN), places, draw.weights(), own), {}


def _masked(draw: Draw) -> Arguments:
    return (draw.rows(), masked.moe_align_masked(draw.ids(), 2, 4, MAX_ROWS)), {}


def _masked_in_use(out: Any, arguments: Arguments) -> list[Tensor]:
    rows_TK = arguments[0][1].rows_TK
    rows = rows_TK[rows_TK >= 0].long()
    scales = out.scale_LMG[rows // MAX_ROWS, rows % MAX_ROWS]
    return [out.data_LMD.view(torch.uint8).flatten(0, 1)[rows], scales]


def _pool(draw: Draw) -> dict[str, Tensor]:
    cache = torch.full((2, 64, RANK + ROPE), 7.0, dtype=torch.bfloat16, device=draw.device)
    return {"cache": cache, "slots_T": draw.slots()}


def _store(draw: Draw) -> Arguments:
    rows = draw.numbers(NUM_TOKENS, RANK + ROPE)
    return (rows, draw.numbers(RANK), 1e-6, draw.rotation()), _pool(draw)


def _split(draw: Draw) -> Arguments:
    rows = draw.numbers(NUM_TOKENS, Q_RANK + RANK + ROPE)
    weights = draw.numbers(Q_RANK), draw.numbers(RANK)
    return (rows, *weights, 1e-6, draw.rotation()), _pool(draw)


def _scores(draw: Draw) -> Arguments:
    dtype = draw.product_dtype
    sizes = (NUM_TOKENS, HIDDEN), (16, HIDDEN)
    hidden, weight = (draw.numbers(*size, dtype=dtype) for size in sizes)
    return (hidden, weight), {}


def _summed(logits: Tensor, _: Arguments) -> list[Tensor]:
    return [logits if logits.dim() == 2 else logits.sum(0)]


def _norm(draw: Draw) -> Arguments:
    return (draw.numbers(NUM_TOKENS, HIDDEN), draw.numbers(HIDDEN), 1e-6), {}


def _add_norm(draw: Draw) -> tuple[Any, ...]:
    rows = (draw.numbers(NUM_TOKENS, HIDDEN) for _ in range(2))
    return (*rows, draw.numbers(HIDDEN), 1e-6)


EXAMPLES: dict[AnyOp, Example] = {
    norm.RMS_NORM: Example(draw=_norm),
    norm.ADD_RMS_NORM: Example(draw=lambda draw: (_add_norm(draw), {})),
    norm.ADD_RMS_NORM_FP8: Example(draw=lambda draw: (_add_norm(draw), {"with_plain": True})),
    activation.SILU_AND_MUL: Example(
        draw=lambda draw: ((draw.numbers(NUM_TOKENS, HIDDEN),), {}), is_exact=True
    ),
    activation.SILU_AND_MUL_FP8: Example(
        draw=lambda draw: ((draw.numbers(NUM_TOKENS, 2 * HIDDEN),), {})
    ),
    gate.GATE_LOGITS: Example(draw=_scores, look=_summed),
    gate.GROUP_LIMITED_TOPK: Example(
        draw=lambda draw: (
            (
                draw.numbers(NUM_TOKENS, 16, dtype=torch.float32),
                draw.numbers(16, dtype=torch.float32) * 0.1,
                RULE,
                torch.tensor([NUM_TOKENS - 1], device=draw.device),
                torch.zeros(17, dtype=torch.int64, device=draw.device),
            ),
            {},
        )
    ),
    permute.COUNT_ROWS: Example(draw=lambda draw: ((draw.ids(), 2, 4), {}), is_exact=True),
    permute.MOE_ALIGN_BLOCK_SIZE: Example(
        draw=lambda draw: ((draw.ids(), 2, 4), {}), is_exact=True
    ),
    permute.PERMUTE_ROWS: Example(draw=_aligned, look=_aligned_in_use, is_exact=True),
    permute.UNPERMUTE_ROWS: Example(draw=_sums),
    masked.MOE_ALIGN_MASKED: Example(
        draw=lambda draw: ((draw.ids(), 2, 4, MAX_ROWS), {}), is_exact=True
    ),
    masked.PERMUTE_MASKED_ROWS: Example(draw=_masked, look=_masked_in_use, is_exact=True),
    latents.ROTATE_QUERIES: Example(
        draw=lambda draw: (
            (draw.numbers(NUM_TOKENS, NUM_HEADS, NOPE + ROPE), draw.rotation()),
            {},
        )
    ),
    latents.STORE_LATENTS: Example(draw=_store),
    latents.SPLIT_LATENTS: Example(draw=_split),
    latents.JOIN_KEYS: Example(
        draw=lambda draw: (
            (draw.numbers(NUM_TOKENS, NUM_HEADS, NOPE), draw.numbers(NUM_TOKENS, ROPE)),
            {},
        ),
        is_exact=True,
    ),
}
"""By operation, for all of the table."""
