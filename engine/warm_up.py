"""Compile before the first request: every product of a model, at every tile that rows can choose.

Libraries that compile at run time pick a kernel by the weight's shape and by how many rows come, so
the first batch of a new size would wait seconds for a compiler, and in a group the others would
wait for it inside a collective. The key idea: one rank runs each product alone, with invented rows,
while the others stay away; what it compiled lies in a cache (`engine.jit_cache`) that they then
only read. Two processes that compile one kernel at the same time would race for its cache entry.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.kernels.alignment import ROW_BLOCK
from engine.kernels.base import Kernels
from engine.kernels.fp8_rows import Fp8Rows
from engine.layers.matrix import Matrix
from engine.layers.moe import Experts
from engine.parallel.groups import ProcessGroups
from engine.weights.loader import ProgressCallback

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One call that may compile.

    Attributes:
        name: kind, weight shape and rows.
        run: makes the call once.
    """

    name: str
    run: Callable[[], object]


def row_counts(max_tokens: int) -> list[int]:
    """Return the numbers of rows to try, ascending: tiles change at most once between two.

    Every multiple of a tile up to 1024 rows, where the choice of a tile varies; powers of two
    beyond.
    """
    small = [1, *range(16, 128, 16), *range(128, 1024, 128)]
    large = [1024 << n for n in range(max_tokens.bit_length()) if 1024 << n < max_tokens]
    return [rows for rows in (*small, *large) if rows < max_tokens] + [max_tokens]


def products(
    model: nn.Module, kernels: Kernels, max_tokens: int, *, rows: Sequence[int] | None = None
) -> list[Product]:
    """Return the products of a model in FP8, each weight shape once; none without FP8.

    Args:
        model: with its weights allocated; their values do not matter.
        kernels: of the model.
        max_tokens: most tokens of a step on this rank.
        rows: to try instead of `row_counts(max_tokens)`, by whoever knows which will come.
    """
    rows = row_counts(max_tokens) if rows is None else rows
    found: dict[tuple[str, tuple[int, ...]], list[Product]] = {}
    for module in model.modules():
        if isinstance(module, Experts) and module.is_fp8:
            key = ("experts", tuple(module.w13.shape))
            if key not in found:
                found[key] = list(_expert_products(module, kernels, max_tokens))
        elif isinstance(module, Matrix) and module.is_fp8 and module.weight.dim() == 2:
            key = ("linear", tuple(module.weight.shape))
            if key not in found:
                found[key] = list(_linear_products(module, kernels, rows))
    return [product for alike in found.values() for product in alike]


def warm_up(
    todo: Sequence[Product],
    groups: ProcessGroups,
    *,
    synchronize: Callable[[], None] = lambda: None,
    progress: ProgressCallback | None = None,
) -> None:
    """Run every product once: rank 0 while the others wait, then the others from the cache.

    Args:
        todo: the same products on every rank.
        groups: the ranks of the instance.
        synchronize: waits for the device, so that failures belong to their product.
        progress: told (products done, products) on rank 0.
    """
    start = time.perf_counter()
    group = groups.tp_group if groups.dims.tp > 1 else groups.ep_group
    for is_turn in (groups.rank == 0, groups.rank != 0):
        for done, product in enumerate(todo, start=1):
            if is_turn:
                product.run()
                if progress is not None:
                    progress(done, len(todo))
            group.barrier()  # each time, because no rank waits for long in a collective
        if is_turn:
            synchronize()
        group.barrier()
    logger.info("warmed up products=%d seconds=%.2f", len(todo), time.perf_counter() - start)


def _linear_products(matrix: Matrix, kernels: Kernels, rows: Sequence[int]) -> Iterator[Product]:
    columns, device = matrix.weight.shape[1], matrix.weight.device

    def run(count: int) -> Callable[[], object]:
        return lambda: matrix(_invent_rows(count, columns, device, kernels))

    for count in rows:
        yield Product(name=f"linear {tuple(matrix.weight.shape)} x {count}", run=run(count))


def _expert_products(experts: Experts, kernels: Kernels, max_tokens: int) -> Iterator[Product]:
    """Grouped products; their tiles do not depend on the rows, only on shape and stack."""
    columns, device = experts.w13.shape[2], experts.w13.device
    pairs = experts.up.quantized_pair(), experts.down.quantized_pair()
    num_rows = min(ROW_BLOCK * experts.num_local_experts, -(-max_tokens // ROW_BLOCK) * ROW_BLOCK)

    def run() -> object:
        blocks = torch.arange(num_rows // ROW_BLOCK, dtype=torch.int32, device=device)
        rows = _invent_rows(num_rows, columns, device, kernels)
        return kernels.grouped_fp8_mlp(rows, blocks.repeat_interleave(ROW_BLOCK), *pairs)

    yield Product(name=f"experts {tuple(experts.w13.shape)}", run=run)


def _invent_rows(rows: int, columns: int, device: torch.device, kernels: Kernels) -> Fp8Rows:
    values = torch.randn((rows, columns), device=device, dtype=torch.bfloat16)
    return kernels.quantize_rows(values)
