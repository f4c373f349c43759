"""Random operands of a product on a device, and what some of its rows must come out as.

All rows that are in use hold random numbers. The expected values are computed for a sample of rows,
because those of 65,536 rows would take longer than all the timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.formats.triton_gemm.gemm import Product
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout
from engine.kernels import reference
from engine.kernels.alignment import ROW_BLOCK
from engine.kernels.masked_rows import empty_masked
from engine.weights.fp8 import quantize_block

MASKED_ROOM = 2
"""Rows of an expert's run in the masked layout, as a multiple of those in use; 128 at least."""


PIECE = 8192
"""Rows that are drawn at once: they are float32 before they are quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Some rows of one expert, by their place among all G * R rows, and their product."""

    rows: Tensor
    expected: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A product, its samples, and 2 M N K of the rows in use."""

    job: Product
    samples: tuple[Sample, ...]
    operations: float


def draw_inputs(shape: ProductShape, device: torch.device) -> Inputs:
    """Return random operands and an uninitialised result."""
    weight = _draw_weights(shape, device)
    masked = shape.layout is RowLayout.MASKED
    num_groups = shape.num_experts if masked else 1
    num_rows = _round_up(MASKED_ROOM * shape.num_rows) if masked else shape.num_rows
    data, scale = _draw_rows(num_groups, num_rows, shape.depth, device)
    out = torch.empty(
        (num_groups, num_rows, shape.num_columns), dtype=torch.bfloat16, device=device
    )
    job = Product(
        layout=shape.layout,
        rows=(data, scale),
        weight=weight,
        experts=_draw_experts(shape, device),
        out=out,
    )
    used = shape.num_rows * num_groups
    return Inputs(
        job=job,
        samples=tuple(_sample(job, rows, expert) for rows, expert in _choose_rows(shape, num_rows)),
        operations=2.0 * used * shape.num_columns * shape.depth,
    )


def _draw_weights(shape: ProductShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return [E, N, K] and scales; experts are one matrix with its blocks of rows turned around."""
    matrix = torch.randn(shape.num_columns, shape.depth, device=device)
    weight, scale = quantize_block(matrix / shape.depth**0.5)
    if shape.num_experts == 1:
        return weight.unsqueeze(0), scale.unsqueeze(0)
    assert shape.num_columns % ROW_BLOCK == 0, shape
    turned = [
        (weight.view(torch.uint8).roll(expert * ROW_BLOCK, 0), scale.roll(expert, 0))
        for expert in range(shape.num_experts)
    ]
    weights = torch.stack([w for w, _ in turned]).view(torch.float8_e4m3fn)
    return weights, torch.stack([s for _, s in turned])


def _draw_rows(
    num_groups: int, num_rows: int, depth: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return [G, R, K] and scales, column by column, as every kernel takes them."""
    room = -(-num_rows // 4) * 4
    data, scale = empty_masked(num_groups, room, depth, device)
    for group in range(num_groups):
        for start in range(0, room, PIECE):
            piece = slice(start, min(start + PIECE, room))
            numbers = torch.randn(piece.stop - start, depth, device=device)
            rows = reference.quantize_rows(numbers)
            data[group, piece].view(torch.uint8).copy_(rows.data_TK.view(torch.uint8))
            scale[group, piece].copy_(rows.scale_TG)
    return data[:, :num_rows], scale[:, :num_rows]


def _draw_experts(shape: ProductShape, device: torch.device) -> Tensor:
    """Return what `Product.experts` holds; experts have equal numbers of rows."""
    match shape.layout:
        case RowLayout.PLAIN:
            return torch.zeros(1, dtype=torch.int32, device=device)
        case RowLayout.ALIGNED:
            names = torch.arange(shape.num_experts, dtype=torch.int32, device=device)
            return names.repeat_interleave(shape.num_rows // shape.num_experts)
        case RowLayout.MASKED:
            counts = [shape.num_rows] * shape.num_experts
            return torch.tensor(counts, dtype=torch.int32, device=device)


def _choose_rows(shape: ProductShape, rows_per_group: int) -> list[tuple[range, int]]:
    """Return places of rows to check, with their expert: the first, the last, some between."""
    if shape.layout is RowLayout.PLAIN:
        step = max(1, shape.num_rows // 128)
        return [(range(shape.num_rows - 1, -1, -step), 0)]
    chosen = sorted({0, shape.num_experts // 2, shape.num_experts - 1})
    if shape.layout is RowLayout.ALIGNED:
        each = shape.num_rows // shape.num_experts
        return [(range(e * each, e * each + each, max(1, each // 64)), e) for e in chosen]
    return [(range(e * rows_per_group, e * rows_per_group + shape.num_rows), e) for e in chosen]


def _sample(job: Product, places: range, expert: int) -> Sample:
    data, scale = job.rows
    index = torch.tensor(list(places), device=data.device)
    group, row = index // data.shape[1], index % data.shape[1]
    rows = Fp8Rows(
        data_TK=data.view(torch.uint8)[group, row].view(torch.float8_e4m3fn),
        scale_TG=scale[group, row],
    )
    expected = reference.fp8_linear(rows, job.weight[0][expert], job.weight[1][expert])
    return Sample(rows=index, expected=expected)


def _round_up(rows: int) -> int:
    return -(-rows // ROW_BLOCK) * ROW_BLOCK
