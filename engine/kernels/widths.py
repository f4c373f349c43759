"""Sizes that belong together, for operations that address memory by more than one of them.

Both implementations of an operation ask here, so that what serves a model on a CPU has shown that
the kernels of a GPU would be called rightly. Nothing here reads a device.

Legend: T tokens, H heads, N numbers of a head's query without the rotated R, A = N + R, V value
numbers of a head, C kv_lora_rank, L = C + R, K experts per token, M expert rows, D hidden size.
"""

from torch import Tensor

from engine.formats.fp8_rows import GROUP, Fp8Rows
from engine.invariants import require
from engine.kernels.alignment import ROW_BLOCK, Alignment
from engine.kernels.masked_rows import MaskedPlaces
from engine.kernels.rotation import Rotation


def check_rotation(rotation: Rotation, num_tokens: int) -> None:
    """Check angles for T tokens: two contiguous tensors [T, R / 2].

    Raises:
        InternalError: they are not.
    """
    cos, sin = rotation.cos, rotation.sin
    require(
        cos.shape == sin.shape and cos.shape[0] == num_tokens,
        "rotation",
        (tuple(cos.shape), tuple(sin.shape)),
        f"cos and sin of {num_tokens} tokens are wanted",
    )
    require(
        cos.is_contiguous() and sin.is_contiguous(),
        "rotation",
        (cos.stride(), sin.stride()),
        "contiguous cos and sin are wanted",
    )


def check_latents(
    latents_TL: Tensor, rank: int, rotation: Rotation, *, cache: Tensor, slots_T: Tensor
) -> None:
    """Check rows [T, C + R] that are to be stored in a layer [num_blocks, block_size, C + R].

    Args:
        latents_TL: the rows.
        rank: C.
        rotation: of the T tokens.
        cache: the layer.
        slots_T: [T], contiguous.

    Raises:
        InternalError: the sizes do not belong together.
    """
    num_tokens, width = latents_TL.shape
    check_rotation(rotation, num_tokens)
    wanted = rank + 2 * rotation.cos.shape[1]
    require(
        width == cache.shape[2] == wanted,
        "latents and the layer that stores them",
        (width, cache.shape[2]),
        f"widths of {wanted} are wanted, {rank} and the rotated part",
    )
    require(
        slots_T.shape == (num_tokens,) and slots_T.is_contiguous(),
        "slots of latents",
        tuple(slots_T.shape),
        f"one for each of {num_tokens} tokens is wanted",
    )


def check_queries(q_THA: Tensor, weight_HNC: Tensor, rotation: Rotation) -> None:
    """Check queries [T, H, A] for the way into the latent space by a weight [H, N, C].

    Raises:
        InternalError: the sizes do not belong together.
    """
    num_tokens, num_heads, size = q_THA.shape
    check_rotation(rotation, num_tokens)
    num_weights, nope, _ = weight_HNC.shape
    require(
        (num_heads, size) == (num_weights, nope + 2 * rotation.cos.shape[1]),
        "queries",
        tuple(q_THA.shape),
        f"{num_weights} heads of {nope} numbers and {2 * rotation.cos.shape[1]} rotated are wanted",
    )


def check_values(latents_THC: Tensor, weight_HVC: Tensor) -> None:
    """Check latents [T, H, C] for the way out of the latent space by a weight [H, V, C].

    Raises:
        InternalError: the sizes do not belong together.
    """
    num_heads, _, rank = weight_HVC.shape
    require(
        latents_THC.shape[1:] == (num_heads, rank),
        "attended latents",
        tuple(latents_THC.shape),
        f"{num_heads} heads of {rank} numbers are wanted",
    )


def check_capacity(capacity: int) -> None:
    """Check the rows of the contiguous layout that the fast grouped GEMM runs over.

    Raises:
        InternalError: they end within a block of one expert.
    """
    require(not capacity % ROW_BLOCK, "capacity", capacity, f"a multiple of {ROW_BLOCK} is wanted")


def check_unpermute(
    source_MD: Tensor,
    places: Alignment | MaskedPlaces,
    weights_TK: Tensor,
    own_TD: Tensor | None,
) -> None:
    """Check that every place is a row of contiguous `source_MD`, and has a weight.

    Raises:
        InternalError: the sizes do not belong together.
    """
    require(
        source_MD.shape[0] == places.num_rows and source_MD.is_contiguous(),
        "rows to be summed",
        (tuple(source_MD.shape), source_MD.stride()),
        f"{places.num_rows} contiguous rows are wanted, as many as were laid out",
    )
    require(
        weights_TK.shape == places.rows_TK.shape,
        "weights",
        tuple(weights_TK.shape),
        f"{tuple(places.rows_TK.shape)} are wanted, one for each place",
    )
    if own_TD is not None:
        wanted = (weights_TK.shape[0], source_MD.shape[1])
        require(own_TD.shape == wanted, "own term", tuple(own_TD.shape), f"{wanted} is wanted")


def check_permute(data: Tensor, scale: Tensor, rows: Fp8Rows, rows_TK: Tensor) -> None:
    """Check that rows [T, D] fit contiguous `data` [..., M, D], and their scales `scale`.

    Raises:
        InternalError: the sizes do not belong together.
    """
    (num_tokens, size), num_groups = rows.data_TK.shape, rows.scale_TG.shape[1]
    require(
        rows_TK.shape[0] == num_tokens and rows_TK.is_contiguous(),
        "places of rows",
        tuple(rows_TK.shape),
        f"those of {num_tokens} rows are wanted",
    )
    require(
        (data.shape[-1], scale.shape[-1] * GROUP, num_groups * GROUP) == (size, size, size)
        and data.is_contiguous(),
        "room for rows",
        (tuple(data.shape), tuple(scale.shape)),
        f"contiguous rows of {size} numbers and {num_groups} scales are wanted",
    )
    require(
        data.shape[:-1] == scale.shape[:-1] and scale.stride(-2) == 1,
        "room for scales",
        (tuple(scale.shape), scale.stride()),
        f"as many as {tuple(data.shape[:-1])} rows are wanted, one behind the other",
    )
