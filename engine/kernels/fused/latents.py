"""The small steps around attention: rotate queries, store latents, put keys together.

Bound by memory. Storing norms the latent, rotates the key part and writes both into the page of the
KV pool in one pass, so that the projection's output is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2
from engine.kernels.rotation import Rotation


@triton.jit
def _pair_offsets(index, HALF: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return the places of both numbers of each pair."""
    if INTERLEAVE:
        return 2 * index, 2 * index + 1
    return index, index + HALF


@launched()
def _rotate_queries(
    q, cos, sin, num_heads, head_size, offset,
    H: tl.constexpr, HALF: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * H + tl.arange(0, H)
    index = tl.arange(0, HALF)
    cosine = tl.load(cos + token * HALF + index)[None, :]
    sine = tl.load(sin + token * HALF + index)[None, :]
    # Read and written as whole runs of R numbers; pairs are taken apart in registers.
    columns = tl.arange(0, 2 * HALF)
    place = q + token * num_heads * head_size + heads[:, None] * head_size + offset + columns
    mask = (heads < num_heads)[:, None]
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if INTERLEAVE:
        x, y = tl.split(tl.reshape(values, [H, HALF, 2]))
        rotated = tl.reshape(tl.join(x * cosine - y * sine, y * cosine + x * sine), [H, 2 * HALF])
    else:
        x, y = tl.split(tl.trans(tl.reshape(values, [H, 2, HALF]), (0, 2, 1)))
        pair = tl.join(x * cosine - y * sine, y * cosine + x * sine)
        rotated = tl.reshape(tl.trans(pair, (0, 2, 1)), [H, 2 * HALF])
    tl.store(place, rotated.to(q.dtype.element_ty), mask=mask)


@launched()
def _store_latents(
    latents, weight, cos, sin, slots, cache, stride, block_stride, row_stride, block_size, eps,
    rank, C: tl.constexpr, HALF: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    page = cache + (slot // block_size) * block_stride + (slot % block_size) * row_stride
    columns = tl.arange(0, C)
    mask = columns < rank
    values = tl.load(latents + token * stride + columns, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / rank + eps)).to(values.dtype)
    scaled = normed.to(tl.float32) * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    scaled = scaled.to(values.dtype)
    tl.store(page + columns, scaled.to(cache.dtype.element_ty), mask=mask)
    index = tl.arange(0, HALF)
    left, right = _pair_offsets(index, HALF, INTERLEAVE)
    source = latents + token * stride + rank
    x = tl.load(source + left).to(tl.float32)
    y = tl.load(source + right).to(tl.float32)
    cosine = tl.load(cos + token * HALF + index)
    sine = tl.load(sin + token * HALF + index)
    # Rounded to the activations' type first, as the reference does.
    first = (x * cosine - y * sine).to(values.dtype)
    second = (y * cosine + x * sine).to(values.dtype)
    tl.store(page + rank + left, first.to(cache.dtype.element_ty))
    tl.store(page + rank + right, second.to(cache.dtype.element_ty))


@launched()
def _join_keys(
    expanded, k_pe, out, row_stride, head_stride, pe_stride, num_heads,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * H + tl.arange(0, H)
    mask = (heads < num_heads)[:, None]
    nope = tl.arange(0, N)[None, :]
    rope = tl.arange(0, R)[None, :]
    source = expanded + position * row_stride + heads[:, None] * head_stride
    target = out + (position * num_heads + heads[:, None]) * (N + R)
    tl.store(target + nope, tl.load(source + nope, mask=mask), mask=mask)
    shared = tl.load(k_pe + position * pe_stride + rope)
    tl.store(target + N + rope, tl.broadcast_to(shared, [H, R]), mask=mask)


def rotate_queries(q_THA: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the last R numbers of every head of contiguous [T, H, A] in place, and return it."""
    assert q_THA.is_contiguous()
    num_tokens, num_heads, head_size = q_THA.shape
    half = rotation.cos.shape[1]
    # In place: a tile has a number for every thread, else warps hold copies and race.
    heads = max(4, min(32, next_power_of_2(num_heads)))
    if num_tokens:
        _rotate_queries(
            (num_tokens, ceil_div(num_heads, heads)),
            (q_THA, rotation.cos, rotation.sin),
            (num_heads, head_size, head_size - 2 * half),
            constants=(heads, half, rotation.interleave),
        )
    return q_THA


def store_latents(
    latents_TL: Tensor, weight_C: Tensor, eps: float, rotation: Rotation, *,
    cache: Tensor, slots_T: Tensor,
) -> None:  # fmt: skip
    """Norm kv_c, rotate k_pe, and write both into one layer of the KV pool.

    Args:
        latents_TL: [T, C + R] of the projection, unit stride along L.
        weight_C: [C], of the norm.
        eps: of the norm.
        rotation: of the T tokens.
        cache: [num_blocks, block_size, C + R], unit stride along the last dimension.
        slots_T: [T] int64, block_id * block_size + offset.
    """
    assert latents_TL.stride(1) == 1
    assert cache.stride(2) == 1
    if latents_TL.shape[0]:
        rank = weight_C.shape[0]
        block_stride, row_stride, _ = cache.stride()
        _store_latents(
            (latents_TL.shape[0],),
            (latents_TL, weight_C, rotation.cos, rotation.sin, slots_T, cache),
            (latents_TL.stride(0), block_stride, row_stride, cache.shape[1], eps, rank),
            constants=(next_power_of_2(rank), rotation.cos.shape[1], rotation.interleave),
        )


def join_keys(k_nope_PHN: Tensor, k_pe_PR: Tensor) -> Tensor:
    """Return [P, H, N + R]: each head's own part and the part that all heads share.

    N and R are powers of two; both inputs may be strided views with unit stride at the end.
    """
    num_positions, num_heads, nope = k_nope_PHN.shape
    rope = k_pe_PR.shape[1]
    out = torch.empty(
        (num_positions, num_heads, nope + rope), dtype=k_nope_PHN.dtype, device=k_nope_PHN.device
    )
    heads = min(16, next_power_of_2(num_heads))
    if num_positions:
        row_stride, head_stride, _ = k_nope_PHN.stride()
        _join_keys(
            (num_positions, ceil_div(num_heads, heads)),
            (k_nope_PHN, k_pe_PR, out),
            (row_stride, head_stride, k_pe_PR.stride(0), num_heads),
            constants=(heads, nope, rope),
        )
    return out
