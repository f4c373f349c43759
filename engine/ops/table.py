"""All operations, a line each: what a model's layers, tests and measurements choose from."""

from typing import Final

from engine.ops import activation, gate, latents, masked, norm, permute
from engine.ops.op import AnyOp, Ops, Target

OPS: Final[tuple[AnyOp, ...]] = (
    norm.RMS_NORM,
    norm.ADD_RMS_NORM,
    norm.ADD_RMS_NORM_FP8,
    activation.SILU_AND_MUL,
    activation.SILU_AND_MUL_FP8,
    gate.GATE_LOGITS,
    gate.GROUP_LIMITED_TOPK,
    permute.COUNT_ROWS,
    permute.MOE_ALIGN_BLOCK_SIZE,
    permute.PERMUTE_ROWS,
    permute.UNPERMUTE_ROWS,
    masked.MOE_ALIGN_MASKED,
    masked.PERMUTE_MASKED_ROWS,
    latents.ROTATE_QUERIES,
    latents.STORE_LATENTS,
    latents.SPLIT_LATENTS,
    latents.JOIN_KEYS,
)


def resolve_ops(target: Target) -> Ops:
    """Return the table for a target, once for a model; loads its kernels."""
    return Ops.resolve(target, OPS)
