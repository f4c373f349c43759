"""The small steps around attention: rotate queries, store latents, put keys together.

Bound by memory. Storing norms the latent, rotates the key part and writes both into the page of the
KV pool in one pass, so that the projection's output is read once; where the projection makes the
query's latent too, that is normed and quantised by programs of the same kernel.
"""

# Triton compiles these functions itself; their arguments have no Python types.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: no-warn-return-any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.formats.fp8_rows import GROUP, Fp8Rows
from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2
from engine.kernels.fused.quant import _quantize_tile
from engine.kernels.rotation import Rotation
from engine.kernels.widths import check_latents, check_rotation


@triton.jit
def _pair_offsets(index, HALF: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return the places of both numbers of each pair."""
    if INTERLEAVE:
        return 2 * index, 2 * index + 1
    return index, index + HALF


@triton.jit
def rotated(values, cosine, sine, H: tl.constexpr, HALF: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return float32 rows [H, 2 * HALF], turned; pairs are taken apart in registers."""
    if INTERLEAVE:
        x, y = tl.split(tl.reshape(values, [H, HALF, 2]))
        return tl.reshape(tl.join(x * cosine - y * sine, y * cosine + x * sine), [H, 2 * HALF])
    else:
        x, y = tl.split(tl.trans(tl.reshape(values, [H, 2, HALF]), (0, 2, 1)))
        pair = tl.join(x * cosine - y * sine, y * cosine + x * sine)
        return tl.reshape(tl.trans(pair, (0, 2, 1)), [H, 2 * HALF])


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
    # Read and written as whole runs of R numbers.
    columns = tl.arange(0, 2 * HALF)
    place = q + token * num_heads * head_size + heads[:, None] * head_size + offset + columns
    mask = (heads < num_heads)[:, None]
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    turned = rotated(values, cosine, sine, H, HALF, INTERLEAVE)
    tl.store(place, turned.to(q.dtype.element_ty), mask=mask)


@triton.jit
def _store_row(
    latents, token, weight, cos, sin, slots, cache, block_stride, row_stride, block_size, eps, rank,
    C: tl.constexpr, HALF: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """Store one token's latent, of which `latents` points to the first number."""
    columns = tl.arange(0, C)
    mask = columns < rank
    # All loads before the first sum, which everybody waits for.
    slot = tl.load(slots + token)
    values = tl.load(latents + columns, mask=mask, other=0.0)
    gain = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    index = tl.arange(0, HALF)
    left, right = _pair_offsets(index, HALF, INTERLEAVE)
    x = tl.load(latents + rank + left).to(tl.float32)
    y = tl.load(latents + rank + right).to(tl.float32)
    cosine = tl.load(cos + token * HALF + index)
    sine = tl.load(sin + token * HALF + index)
    page = cache + (slot // block_size) * block_stride + (slot % block_size) * row_stride
    wide = values.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / rank + eps)).to(values.dtype)
    scaled = (normed.to(tl.float32) * gain).to(values.dtype)
    tl.store(page + columns, scaled.to(cache.dtype.element_ty), mask=mask)
    # Rounded to the activations' type first, as the reference does.
    first = (x * cosine - y * sine).to(values.dtype)
    second = (y * cosine + x * sine).to(values.dtype)
    tl.store(page + rank + left, first.to(cache.dtype.element_ty))
    tl.store(page + rank + right, second.to(cache.dtype.element_ty))


@launched()
def _store_latents(
    latents, weight, cos, sin, slots, cache, stride, block_stride, row_stride, block_size, eps,
    rank, C: tl.constexpr, HALF: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    _store_row(
        latents + token * stride, token, weight, cos, sin, slots, cache, block_stride, row_stride,
        block_size, eps, rank, C, HALF, INTERLEAVE,
    )  # fmt: skip


@launched("scale_row_stride", "scale_group_stride")
def _split_latents(
    latents, q_weight, weight, cos, sin, slots, data, scale, cache, stride, block_stride,
    row_stride, block_size, eps, q_rank, rank, scale_row_stride, scale_group_stride,
    G: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = latents + token * stride
    if tl.program_id(1) == 0:
        groups = tl.arange(0, G)
        columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
        mask = columns < q_rank
        values = tl.load(row + columns, mask=mask, other=0.0)
        gain = tl.load(q_weight + columns, mask=mask, other=0.0).to(tl.float32)
        wide = values.to(tl.float32)
        mean = tl.sum(tl.sum(wide * wide, axis=1), axis=0) / q_rank
        normed = (wide * tl.rsqrt(mean + eps)).to(values.dtype).to(tl.float32)
        normed = (normed * gain).to(values.dtype)
        quantized, scales = _quantize_tile(normed.to(tl.float32))
        tl.store(data + token * q_rank + columns, quantized, mask=mask)
        place = scale + groups.to(tl.int64) * scale_group_stride + token * scale_row_stride
        tl.store(place, scales, mask=groups * 128 < q_rank)
    else:
        _store_row(
            row + q_rank, token, weight, cos, sin, slots, cache, block_stride, row_stride,
            block_size, eps, rank, C, HALF, INTERLEAVE,
        )  # fmt: skip


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
    num_tokens, num_heads, head_size = q_THA.shape
    half = rotation.cos.shape[1]
    check_rotation(rotation, num_tokens)
    require(
        q_THA.is_contiguous() and head_size >= 2 * half,
        "queries",
        (tuple(q_THA.shape), q_THA.stride()),
        f"contiguous heads of at least {2 * half} numbers are wanted",
    )
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
    rank = weight_C.shape[0]
    check_latents(latents_TL, rank, rotation, cache=cache, slots_T=slots_T)
    _require_runs(latents_TL, cache)
    if latents_TL.shape[0]:
        block_stride, row_stride, _ = cache.stride()
        _store_latents(
            (latents_TL.shape[0],),
            (latents_TL, weight_C, rotation.cos, rotation.sin, slots_T, cache),
            (latents_TL.stride(0), block_stride, row_stride, cache.shape[1], eps, rank),
            constants=(next_power_of_2(rank), rotation.cos.shape[1], rotation.interleave),
        )


def split_latents(
    latents_TX: Tensor, q_weight_Q: Tensor, weight_C: Tensor, eps: float, rotation: Rotation, *,
    cache: Tensor, slots_T: Tensor,
) -> Fp8Rows:  # fmt: skip
    """Norm and quantise query latents, and store the others; see `latents`.

    Args:
        latents_TX: [T, Q + C + R] of the projection, unit stride along X; Q is a multiple of 128.
        q_weight_Q: [Q], of the queries' norm.
        weight_C: see `store_latents`, and so are the others.
        eps: of both norms.
        rotation: of the T tokens.
        cache: one layer of the pool.
        slots_T: of the T tokens.
    """
    num_tokens, (q_rank,), (rank,) = latents_TX.shape[0], q_weight_Q.shape, weight_C.shape
    check_latents(latents_TX[:, q_rank:], rank, rotation, cache=cache, slots_T=slots_T)
    _require_runs(latents_TX, cache)
    out = Fp8Rows.empty(num_tokens, q_rank, latents_TX.device)
    if num_tokens:
        block_stride, row_stride, _ = cache.stride()
        _split_latents(
            (num_tokens, 2),
            (
                latents_TX, q_weight_Q, weight_C, rotation.cos, rotation.sin, slots_T,
                out.data_TK, out.scale_TG, cache,
            ),
            (latents_TX.stride(0), block_stride, row_stride, cache.shape[1], eps, q_rank, rank),
            out.scale_TG.stride(),
            (
                next_power_of_2(ceil_div(q_rank, GROUP)),
                next_power_of_2(rank),
                rotation.cos.shape[1],
                rotation.interleave,
            ),
        )  # fmt: skip
    return out


def _require_runs(latents: Tensor, cache: Tensor) -> None:
    strides = latents.stride(1), cache.stride(2)
    require(strides == (1, 1), "latents and their layer", strides, "rows without gaps are wanted")


def join_keys(k_nope_PHN: Tensor, k_pe_PR: Tensor) -> Tensor:
    """Return [P, H, N + R]: each head's own part and the part that all heads share.

    N and R are powers of two; both inputs may be strided views with unit stride at the end.
    """
    num_positions, num_heads, nope = k_nope_PHN.shape
    rope = k_pe_PR.shape[1]
    require(
        k_pe_PR.shape[0] == num_positions and not (nope & (nope - 1) or rope & (rope - 1)),
        "parts of keys",
        (tuple(k_nope_PHN.shape), tuple(k_pe_PR.shape)),
        "as many positions, and widths that are powers of two, are wanted",
    )
    strides = k_nope_PHN.stride(2), k_pe_PR.stride(1)
    require(strides == (1, 1), "parts of keys", strides, "rows without gaps are wanted")
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
