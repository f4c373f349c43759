"""The way into absorbed attention's latent space and out, in plain PyTorch.

Legend: T tokens, R rows of a rectangle, H heads, A numbers of a head's query, N of them without the
rotated ones, V value numbers of a head, C kv_lora_rank, L = C + the rotated numbers.
"""

from torch import Tensor

from engine.attention.paged_queries import PagedQueries
from engine.formats.fp8_rows import Activation
from engine.kernels import few_rows
from engine.kernels.reference import quantize_rows
from engine.kernels.rotation import Rotation
from engine.kernels.widths import check_queries, check_values
from engine.ops.latents import rotate_queries


def absorb_queries(
    q_THA: Tensor, weight_HNC: Tensor, rotation: Rotation, cache: Tensor, queries: PagedQueries
) -> Tensor:
    """Carry queries into the latent space, and rotate the rest of them.

    Args:
        q_THA: [T, H, A], not rotated; what is there afterwards means nothing.
        weight_HNC: W_UK.
        rotation: of the T tokens.
        cache: the layer of the pool that will be attended to; kernels may round queries to its
            dtype, as their attention would.
        queries: that will attend.

    Returns:
        [T, H, L]: W_UK^T q_nope, then q_pe; [R, H, L] where the queries are a rectangle.
    """
    check_queries(q_THA, weight_HNC, rotation)
    return spread(carry(rotate_queries(q_THA, rotation), weight_HNC), queries)


def spread(q_THL: Tensor, queries: PagedQueries) -> Tensor:
    """Lay rows out as a rectangle where the queries are one."""
    return q_THL if queries.rectangle is None else queries.rectangle.spread(q_THL)


def collect(out_RHC: Tensor, queries: PagedQueries) -> Tensor:
    """Find the rows in it again."""
    return out_RHC if queries.rectangle is None else queries.rectangle.collect(out_RHC)


def carry(q_THA: Tensor, weight_HNC: Tensor) -> Tensor:
    """Do the same for rotated queries."""
    nope, rank = weight_HNC.shape[1:]
    num_tokens, num_heads, size = q_THA.shape
    # The product is written where it is read, in [T, H, L], so that it is not copied.
    q_THL = q_THA.new_empty((num_tokens, num_heads, rank + size - nope))
    q_HTC = q_THL[..., :rank].transpose(0, 1)
    few_rows.batched(q_THA[..., :nope].transpose(0, 1), weight_HNC.mT, q_HTC)
    q_THL[..., rank:] = q_THA[..., nope:]
    return q_THL


def expand_values(
    latents_RHC: Tensor, weight_HVC: Tensor, queries: PagedQueries, *, fp8: bool
) -> Activation:
    """Take what was attended to out of the latent space.

    Args:
        latents_RHC: [T, H, C]; [R, H, C] where the queries are a rectangle.
        weight_HVC: W_UV.
        queries: that have attended.
        fp8: whether the values are wanted quantised.

    Returns:
        [T, H * V].
    """
    check_values(latents_RHC, weight_HVC)
    values = expand(collect(latents_RHC, queries), weight_HVC)
    return quantize_rows(values) if fp8 else values


def expand(latents_THC: Tensor, weight_HVC: Tensor) -> Tensor:
    """Do the same in the dtype of the latents."""
    return expand_heads(latents_THC, weight_HVC).flatten(1)


def expand_heads(latents_THC: Tensor, weight_HVC: Tensor) -> Tensor:
    """Return the values per head, [T, H, V]."""
    out_THV = latents_THC.new_empty((*latents_THC.shape[:2], weight_HVC.shape[1]))
    few_rows.batched(latents_THC.transpose(0, 1), weight_HVC, out_THV.transpose(0, 1))
    return out_THV
