"""The small steps around attention: rotate queries, store latents, put keys together.

Legend: T tokens, H heads, N qk_nope_head_dim, R qk_rope_head_dim, A = N + R, C kv_lora_rank,
Q q_lora_rank, L = C + R, P positions of the context.
"""

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from engine.attention.latent_storage import put_rows
from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.reference import quantize_rows
from engine.kernels.rotation import Rotation
from engine.kernels.widths import check_latents
from engine.ops.norm import rms_norm
from engine.ops.op import Op, Target, Work, late, moved_bytes

if TYPE_CHECKING:
    from engine.formats.triton_gemm import byte_quant
    from engine.ops import latents_kernel, norm_kernel
else:
    byte_quant = late("engine.formats.triton_gemm.byte_quant")
    latents_kernel = late("engine.ops.latents_kernel")
    norm_kernel = late("engine.ops.norm_kernel")


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleave: bool = True) -> Tensor:
    """Rotate pairs of the last dimension, keeping its layout.

    Args:
        x: [T, ..., R].
        cos: [T, R / 2] float32.
        sin: [T, R / 2] float32.
        interleave: pairs are (0, 1), (2, 3), ... as in DeepSeek checkpoints, else (i, i + R / 2).

    Returns:
        The shape and dtype of x. Only products of two tensors rotated alike have a meaning.
    """
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
    cos, sin = cos.view(shape), sin.view(shape)
    if interleave:
        even, odd = x.float().view(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return rotated.flatten(-2).to(x.dtype)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_queries(q_THA: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the last R numbers of every head of [T, H, A] in place, and return it."""
    part = q_THA[..., -2 * rotation.cos.shape[1] :]
    part.copy_(apply_rotary(part, rotation.cos, rotation.sin, interleave=rotation.interleave))
    return q_THA


def _rotated_part(out_THA: Tensor, q_THA: Tensor, rotation: Rotation) -> Work:
    """Take a third of the queries for the part that is read and written."""
    return Work(moved_bytes(out_THA) * 2 / 3)


ROTATE_QUERIES: Final = Op(reference=rotate_queries, work=_rotated_part).on(
    Target.TRITON, lambda: latents_kernel.rotate_queries
)


def store_latents(
    latents_TL: Tensor,
    weight_C: Tensor,
    eps: float,
    rotation: Rotation,
    *,
    cache: Tensor,
    slots_T: Tensor,
) -> None:
    """Norm kv_c, rotate k_pe, and write both into one layer of the KV pool.

    Args:
        latents_TL: [T, C + R] of the projection.
        weight_C: [C], of the norm.
        eps: of the norm.
        rotation: of the T tokens.
        cache: [num_blocks, block_size, C + R], any strides.
        slots_T: [T] int64, block_id * block_size + offset.
    """
    check_latents(latents_TL, weight_C.shape[0], rotation, cache=cache, slots_T=slots_T)
    kv_c_TC, k_pe_TR = latents_TL.tensor_split([weight_C.shape[0]], dim=1)
    kv_c_TC = rms_norm(kv_c_TC, weight_C, eps)
    k_pe_TR = apply_rotary(k_pe_TR, rotation.cos, rotation.sin, interleave=rotation.interleave)
    put_rows(cache, slots_T, torch.cat((kv_c_TC, k_pe_TR), dim=1))


def _store_by_hand(
    latents_TL: Tensor,
    weight_C: Tensor,
    eps: float,
    rotation: Rotation,
    *,
    cache: Tensor,
    slots_T: Tensor,
) -> None:
    """Store in e4m3 as PyTorch rounds it, which makes the bits by hand."""
    if cache.dtype != torch.float8_e4m3fn:
        latents_kernel.store_latents(
            latents_TL, weight_C, eps, rotation, cache=cache, slots_T=slots_T
        )
        return
    # As rows of a block of their own, which PyTorch then rounds.
    rows_TL = torch.empty(latents_TL.shape, dtype=latents_TL.dtype, device=cache.device)
    places_T = torch.arange(len(rows_TL), device=cache.device)
    latents_kernel.store_latents(
        latents_TL, weight_C, eps, rotation, cache=rows_TL.unsqueeze(0), slots_T=places_T
    )
    put_rows(cache, slots_T, rows_TL)


def _next_to_nothing(*_: object, **__: object) -> Work:
    """Of the whole layer that they are given, they touch a few rows."""
    return Work(0)


STORE_LATENTS: Final = (
    Op(reference=store_latents, work=_next_to_nothing)
    .on(Target.TRITON, lambda: latents_kernel.store_latents)
    .on(Target.NO_E4M3, lambda: _store_by_hand)
)


def split_latents(
    latents_TX: Tensor,
    q_weight_Q: Tensor,
    weight_C: Tensor,
    eps: float,
    rotation: Rotation,
    *,
    cache: Tensor,
    slots_T: Tensor,
) -> Fp8Rows:
    """Norm and quantise the query latents of a projection, and store the others.

    Args:
        latents_TX: [T, Q + C + R].
        q_weight_Q: of the queries' norm.
        weight_C: as `store_latents` takes it, and so are the others.
        eps: of both norms.
        rotation: of the T tokens.
        cache: one layer of the pool.
        slots_T: of the T tokens.

    Returns:
        [T, Q].
    """
    q_TQ, latents_TL = latents_TX.tensor_split([q_weight_Q.shape[0]], dim=1)
    store_latents(latents_TL, weight_C, eps, rotation, cache=cache, slots_T=slots_T)
    return quantize_rows(rms_norm(q_TQ, q_weight_Q, eps))


def _split_by_hand(
    latents_TX: Tensor,
    q_weight_Q: Tensor,
    weight_C: Tensor,
    eps: float,
    rotation: Rotation,
    *,
    cache: Tensor,
    slots_T: Tensor,
) -> Fp8Rows:
    """Store and quantise apart, with bits made by hand."""
    q_TQ, latents_TL = latents_TX.tensor_split([q_weight_Q.shape[0]], dim=1)
    _store_by_hand(latents_TL, weight_C, eps, rotation, cache=cache, slots_T=slots_T)
    return byte_quant.quantize_rows(norm_kernel.rms_norm(q_TQ, q_weight_Q, eps))


SPLIT_LATENTS: Final = (
    Op(reference=split_latents, work=_next_to_nothing)
    .on(Target.TRITON, lambda: latents_kernel.split_latents)
    .on(Target.NO_E4M3, lambda: _split_by_hand)
)


def join_keys(k_nope_PHN: Tensor, k_pe_PR: Tensor) -> Tensor:
    """Return [P, H, N + R]: each head's own part and the part that all heads share."""
    shared = k_pe_PR.unsqueeze(1).expand(-1, k_nope_PHN.shape[1], -1)
    return torch.cat((k_nope_PHN, shared), dim=-1)


def _join_runs(k_nope_PHN: Tensor, k_pe_PR: Tensor) -> Tensor:
    """Leave widths that are no powers of two to the reference."""
    sizes = k_nope_PHN.shape[2], k_pe_PR.shape[1]
    if any(size & (size - 1) for size in sizes):
        return join_keys(k_nope_PHN, k_pe_PR)
    return latents_kernel.join_keys(k_nope_PHN, k_pe_PR)


JOIN_KEYS: Final = Op(reference=join_keys).on(Target.TRITON, lambda: _join_runs)
