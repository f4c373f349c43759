"""Absorbed attention's products per head, with the small steps around them.

Bound by memory: each head's part of kv_b_proj is read for a few tokens. So what else has to be done
to a tile is done while it is in registers. On the way into the latent space: the query's rotated
part is turned and put beside the product, and both are rounded as the pool's numbers are. On the
way out: a head's values are one group of 128, quantised for the product that follows. Weights are
in bfloat16: read in e4m3, and converted on the way, they took as long.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.formats.fp8_rows import GROUP, Activation, Fp8Rows
from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2
from engine.kernels.fused.quant import _quantize_tile
from engine.kernels.rotation import Rotation
from engine.kernels.widths import check_queries, check_values
from engine.ops.latents_kernel import rotated

TAKEN = "heads of 128 numbers and latents of whole groups of 128 are taken, contiguous per head"
"""What `takes` says yes to."""

STAGES = 3
"""Tiles of a value product that are on their way at a time."""


@triton.jit
def _to_pool(x, TO_E4M3: tl.constexpr):
    """Round to the pool's numbers; e4m3 saturates, and keeps NaN."""
    if TO_E4M3:
        wide = x.to(tl.float32)
        wide = tl.clamp(wide, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        return wide.to(tl.float8e4nv)
    else:
        return x


@launched("num_rows")
def _absorb(
    q, weight, cos, sin, chosen, out, num_heads, nope, rank, head_stride, num_rows,
    B: tl.constexpr, N: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVE: tl.constexpr, TO_E4M3: tl.constexpr, CHOOSES: tl.constexpr,
):  # fmt: skip
    """Multiply a head's queries with W columns of its weight, or (last program) rotate the rest."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(2) * B + tl.arange(0, B)
    mask = (rows < num_rows)[:, None]
    tokens = rows.to(tl.int64)
    target = out + (tokens[:, None] * num_heads + head) * (rank + 2 * HALF)
    if CHOOSES:
        tokens = tl.load(chosen + rows, mask=rows < num_rows, other=0)
    source = q + (tokens[:, None] * num_heads + head) * (nope + 2 * HALF)
    if block * W < rank:
        inner = tl.arange(0, N)
        columns = block * W + tl.arange(0, W)
        tile = tl.load(weight + head * head_stride + inner[:, None] * rank + columns[None, :])
        queries = tl.load(source + inner[None, :], mask=mask, other=0.0)
        product = tl.dot(queries, tile).to(queries.dtype)
        tl.store(target + columns[None, :], _to_pool(product, TO_E4M3), mask=mask)
    else:
        index = tokens[:, None] * HALF + tl.arange(0, HALF)[None, :]
        cosine = tl.load(cos + index, mask=mask, other=0.0)
        sine = tl.load(sin + index, mask=mask, other=0.0)
        rest = tl.arange(0, 2 * HALF)[None, :]
        values = tl.load(source + nope + rest, mask=mask, other=0.0)
        turned = rotated(values.to(tl.float32), cosine, sine, B, HALF, INTERLEAVE)
        tl.store(target + rank + rest, _to_pool(turned.to(values.dtype), TO_E4M3), mask=mask)


@launched("row_stride", "group_stride", "num_tokens")
def _expand(
    latents, weight, chosen, out, out_scale, num_heads, rank, head_stride,
    row_stride, group_stride, num_tokens,
    B: tl.constexpr, V: tl.constexpr, K: tl.constexpr, TO_FP8: tl.constexpr,
    CHOOSES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply a head's attended latents with its weight's rows, and quantise them as one group."""
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * B + tl.arange(0, B)
    mask = (tokens < num_tokens)[:, None]
    rows = tokens.to(tl.int64)
    place = rows[:, None] * num_heads + head
    if CHOOSES:
        rows = tl.load(chosen + tokens, mask=tokens < num_tokens, other=0)
    inner = tl.arange(0, K)
    columns = tl.arange(0, V)
    source = latents + (rows[:, None] * num_heads + head) * rank + inner[None, :]
    tile_at = weight + head * head_stride + columns[:, None] * rank + inner[None, :]
    total = tl.zeros([B, V], tl.float32)
    for start in tl.range(0, rank, K, num_stages=STAGES):
        tile = tl.load(source + start, mask=mask, other=0.0)
        total = tl.dot(tile, tl.trans(tl.load(tile_at + start)), total)
    values = total.to(latents.dtype.element_ty)
    target = out + place * V + columns[None, :]
    if TO_FP8:
        quantized, scales = _quantize_tile(values.to(tl.float32))
        tl.store(target, quantized, mask=mask)
        scale_at = out_scale + head * group_stride + tokens.to(tl.int64) * row_stride
        tl.store(scale_at, scales, mask=tokens < num_tokens)
    else:
        tl.store(target, values, mask=mask)


def takes(weight_HNC: Tensor) -> bool:
    """Return whether these are heads of 128 numbers, and latents whole groups of 128."""
    _, size, rank = weight_HNC.shape
    return size == GROUP and rank % GROUP == 0 and weight_HNC.stride()[1:] == (rank, 1)


def absorb_queries(
    q_THA: Tensor,
    weight_HNC: Tensor,
    rotation: Rotation,
    pool_dtype: torch.dtype,
    *,
    rows_R: Tensor | None = None,
) -> Tensor:
    """Return [T, H, L]; see `absorb_reference`. For a weight that `takes` takes.

    Args:
        q_THA: the tokens.
        weight_HNC: W_UK.
        rotation: of the tokens.
        pool_dtype: that the pool's numbers have.
        rows_R: [R] int64, contiguous, of T: then these rows come, [R, H, L].
    """
    check_queries(q_THA, weight_HNC, rotation)
    require(takes(weight_HNC), "weight of queries", tuple(weight_HNC.shape), TAKEN)
    require(q_THA.is_contiguous(), "queries", q_THA.stride(), "contiguous ones are wanted")
    _check_chosen("rows of a rectangle", rows_R)
    num_tokens, num_heads, _ = q_THA.shape
    num_rows = num_tokens if rows_R is None else rows_R.shape[0]
    _, nope, rank = weight_HNC.shape
    half = rotation.cos.shape[1]
    to_e4m3 = pool_dtype == torch.float8_e4m3fn
    out = torch.empty(
        (num_rows, num_heads, rank + 2 * half),
        dtype=pool_dtype if to_e4m3 else q_THA.dtype,
        device=q_THA.device,
    )
    tile = _rows(num_rows, most=64)
    chosen = rotation.cos if rows_R is None else rows_R
    if num_rows:
        _absorb(
            (rank // GROUP + 1, num_heads, ceil_div(num_rows, tile)),
            (q_THA, weight_HNC, rotation.cos, rotation.sin, chosen, out),
            (num_heads, nope, rank, weight_HNC.stride(0)),
            (num_rows,),
            (tile, nope, GROUP, half, rotation.interleave, to_e4m3, rows_R is not None),
        )
    return out


def expand_values(
    latents_RHC: Tensor, weight_HVC: Tensor, *, fp8: bool, places_T: Tensor | None = None
) -> Activation:
    """Return [T, H * V]; see `absorb_reference`. For a weight that `takes` takes.

    Args:
        latents_RHC: what was attended to.
        weight_HVC: W_UV.
        fp8: whether the values are wanted quantised.
        places_T: [T] int64, contiguous, of R: in which row each token stands; None where T is R.
    """
    check_values(latents_RHC, weight_HVC)
    require(takes(weight_HVC), "weight of values", tuple(weight_HVC.shape), TAKEN)
    _check_chosen("places of tokens", places_T)
    latents_RHC = latents_RHC.contiguous()
    num_rows, num_heads, rank = latents_RHC.shape
    num_tokens = num_rows if places_T is None else places_T.shape[0]
    value, device = weight_HVC.shape[1], latents_RHC.device
    size = (num_tokens, num_heads * value)
    out: Activation
    if fp8:
        out = Fp8Rows.empty(*size, device)
        target, out_scale = out.data_TK, out.scale_TG
    else:
        out = target = out_scale = torch.empty(size, dtype=latents_RHC.dtype, device=device)
    chosen = weight_HVC if places_T is None else places_T
    rows = _rows(num_tokens, most=128)
    if num_tokens:
        _expand(
            (ceil_div(num_tokens, rows), num_heads),
            (latents_RHC, weight_HVC, chosen, target, out_scale),
            (num_heads, rank, weight_HVC.stride(0)),
            (*out_scale.stride(), num_tokens),
            (rows, value, GROUP, fp8, places_T is not None, STAGES),
            num_warps=8 if rows == 128 else 4,
        )
    return out


def _check_chosen(what: str, rows: Tensor | None) -> None:
    is_right = rows is None or (rows.is_contiguous() and rows.dtype == torch.int64)
    require(is_right, what, rows, "contiguous int64 numbers are wanted")


def _rows(num_tokens: int, *, most: int) -> int:
    """Return the rows of a tile: a power of two that a product takes, 16 or more."""
    return min(most, max(16, next_power_of_2(max(1, num_tokens))))
