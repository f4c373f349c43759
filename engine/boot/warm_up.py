"""Compile before the first request: every product of a model, at every tile that rows can choose.

Libraries that compile at run time pick a kernel by the weight's shape and by how many rows come, so
the first batch of a new size would wait seconds for a compiler, and in a group the others would
wait for it inside a collective. The key idea: the ranks divide the weight shapes among themselves
and run their products, with invented rows, side by side; what they compiled lies in a cache
(`engine.boot.jit_cache`) that all then only read. Two ranks never compile one kernel at the same
time.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.attention.kernels import AttentionKernels, VarlenLengths
from engine.formats.expert_rows import AlignedRows
from engine.formats.fp8_rows import GROUP, Fp8Rows
from engine.kernels.alignment import ROW_BLOCK, max_aligned_rows, row_steps
from engine.kernels.masked_rows import MaskedRoom, MaskedRows
from engine.layers.matrix import Matrix
from engine.layers.mla import MLA
from engine.layers.moe import Experts, MoE
from engine.model.spec import ServedModel
from engine.parallel.groups import ProcessGroups
from engine.parallel.token_dispatcher import MaskingDispatcher
from engine.weights.loader import ProgressCallback

ROWS_VARIABLE = "TANDEM_COMPILE_ROWS"
"""Names the numbers of rows to compile for, a comma list, where all would take too long.

For measurements and tests that know which steps will come; any other compiles when it comes."""

_MAX_EXPERT_ROWS = 32768
"""Of grouped products: beyond, so many tiles run that more of them change no choice."""

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

    @property
    def shape(self) -> str:
        """Kind and weight shape: products that differ in it share no kernel."""
        return self.name.split(" x ")[0]


def row_counts(max_tokens: int) -> list[int]:
    """Return the numbers of rows to try, ascending: enough of them to meet every tile.

    A library's choice depends on the rows in tiles of 64 to 256, by how well the last of many waves
    of tiles is filled: back and forth among neighbours, the less the more waves there are.
    """
    small = [1, *range(16, 128, 16), *range(128, 2048, 64)]
    large = [*range(2048, 8192, 128), *range(8192, max_tokens, 512)]
    return [rows for rows in (*small, *large) if rows < max_tokens] + [max_tokens]


def chosen_rows(environment: Mapping[str, str], max_tokens: int) -> list[int]:
    """Return the numbers of rows to try: those that `ROWS_VARIABLE` names, or `row_counts`."""
    chosen = environment.get(ROWS_VARIABLE, "")
    named = {int(text) for text in chosen.split(",") if text.strip()}
    return sorted(rows for rows in named if rows <= max_tokens) or row_counts(max_tokens)


def products(
    model: ServedModel, max_tokens: int, *, rows: Sequence[int] | None = None
) -> list[Product]:
    """Return the products of a model with quantised rows, each weight shape once.

    Args:
        model: with its weights allocated; their values do not matter.
        max_tokens: most tokens of a step on this rank.
        rows: to try instead of `row_counts(max_tokens)`, by whoever knows which will come.
    """
    rows = row_counts(max_tokens) if rows is None else rows
    found: dict[tuple[str, tuple[int, ...]], list[Product]] = {}
    for module in model.modules():
        if isinstance(module, MoE) and module.experts.takes_quantized:
            experts, dispatcher = module.experts, module.dispatcher
            key = ("experts", tuple(experts.w13.shape))
            if key in found:
                continue
            if isinstance(dispatcher, MaskingDispatcher):
                top_k = module.gate.top_k
                rooms = {dispatcher.masked_room(count, top_k) for count in rows}
                found[key] = list(_masked_products(experts, rooms))
            else:
                found[key] = list(_expert_products(experts, max_tokens * module.gate.top_k))
        elif isinstance(module, Matrix) and module.takes_quantized and module.weight.dim() == 2:
            key = ("linear", tuple(module.weight.shape))
            if key not in found:
                found[key] = list(_linear_products(module, rows))
    return [product for alike in found.values() for product in alike]


def attention_products(model: ServedModel) -> list[Product]:
    """Return decompressed attention over one short sequence, if the model has attention.

    Over a whole context, and over the parts that a long one is cut into.
    """
    layer = next((module for module in model.modules() if isinstance(module, MLA)), None)
    if layer is None:
        return []
    kernels = model.kernels.attention
    kinds = {"whole": None, "own part": True, "earlier part": False}
    return [
        Product(name=f"attention {name}", run=partial(_run_attention, layer, kernels, is_causal))
        for name, is_causal in kinds.items()
    ]


def warm_up(
    todo: Sequence[Product],
    groups: ProcessGroups,
    *,
    synchronize: Callable[[], None] = lambda: None,
    progress: ProgressCallback | None = None,
) -> None:
    """Run every product once: each weight shape on one rank, then all on all, from the cache.

    Args:
        todo: the same products on every rank.
        groups: the ranks of the instance.
        synchronize: waits for the device, so that failures belong to their product.
        progress: told (rounds done, rounds).
    """
    start = time.perf_counter()
    group = groups.boot_group
    shares = divide(todo, group.size)
    own, num_rounds = shares[group.rank], max(map(len, shares))
    for done in range(num_rounds):
        if done < len(own):
            own[done].run()
            synchronize()
        group.barrier()  # each time, because no rank waits for long in a collective
        if progress is not None:
            progress(done + 1, num_rounds)
    if group.size > 1:
        for product in todo:
            product.run()
        synchronize()
        group.barrier()
    logger.info("warmed up products=%d seconds=%.2f", len(todo), time.perf_counter() - start)


def divide(todo: Sequence[Product], num_ranks: int) -> list[list[Product]]:
    """Return each rank's share: all products of a shape go to one, the longest lists first."""
    alike: dict[str, list[Product]] = {}
    for product in todo:
        alike.setdefault(product.shape, []).append(product)
    shares: list[list[Product]] = [[] for _ in range(num_ranks)]
    for products_of_shape in sorted(alike.values(), key=len, reverse=True):
        min(shares, key=len).extend(products_of_shape)
    return shares


def _linear_products(matrix: Matrix, rows: Sequence[int]) -> Iterator[Product]:
    def run(count: int) -> Callable[[], object]:
        return lambda: matrix(_invent_rows(count, matrix))

    for count in rows:
        yield Product(name=f"linear {tuple(matrix.weight.shape)} x {count}", run=run(count))


def _expert_products(experts: Experts, num_pairs: int) -> Iterator[Product]:
    """Grouped products over every number of rows that is laid out."""
    num_local, device = experts.num_local_experts, experts.w13.device

    def run(num_rows: int) -> Callable[[], object]:
        def product() -> object:
            blocks = torch.arange(num_rows // ROW_BLOCK, dtype=torch.int32, device=device)
            expert_M = (blocks % num_local).repeat_interleave(ROW_BLOCK)
            rows = _invent_rows(num_rows, experts.up)
            return experts(AlignedRows(rows=rows, expert_M=expert_M))

        return product

    most = min(max_aligned_rows(num_pairs, num_local), _MAX_EXPERT_ROWS)
    for num_rows in row_steps(most):
        yield Product(name=f"experts {tuple(experts.w13.shape)} x {num_rows}", run=run(num_rows))


def _masked_products(experts: Experts, rooms: Iterable[MaskedRoom]) -> Iterator[Product]:
    """Masked products; their tiles depend on how many rows the host expects."""
    columns, num_experts = experts.w13.shape[2], experts.num_local_experts

    def run(room: MaskedRoom) -> Callable[[], object]:
        return lambda: experts(_invent_masked(num_experts, columns, room, experts.w13.device))

    for room in sorted(rooms, key=lambda room: (room.max_rows, room.expected_rows)):
        name = f"experts {tuple(experts.w13.shape)} masked x {room.expected_rows}"
        yield Product(name=f"{name} of {room.max_rows}", run=run(room))


def _invent_masked(
    num_experts: int, columns: int, room: MaskedRoom, device: torch.device
) -> MaskedRows:
    """Return zeros, one row of each expert in use."""
    size = (num_experts, room.max_rows, columns)
    scales = torch.ones((size[0], columns // GROUP, size[1]), device=device)
    return MaskedRows(
        data_LMD=torch.zeros(size, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        scale_LMG=scales.transpose(1, 2),
        num_rows_L=torch.ones(num_experts, dtype=torch.int32, device=device),
        expected_rows=room.expected_rows,
    )


def _run_attention(layer: MLA, kernels: AttentionKernels, is_causal: bool | None) -> Tensor:
    """Attend as the layer does: values are a strided part of what keys and values come in.

    Args:
        layer: any.
        kernels: of the model.
        is_causal: of one part of a context; None for all of it.
    """
    weight, count = layer.kv_a_layernorm.weight, ROW_BLOCK
    heads, key_dim = layer.num_heads, layer.nope_dim + layer.rope_dim
    q_THA, k_PHA = (weight.new_zeros(count, heads, key_dim) for _ in range(2))
    v_PHV = weight.new_zeros(count, heads, layer.nope_dim + layer.value_dim)[..., layer.nope_dim :]
    ends = torch.tensor([0, count], dtype=torch.int32, device=weight.device)
    seqs = VarlenLengths(lengths=[(count, count)], cu_seqlens_q=ends, cu_seqlens_k=ends)
    if is_causal is None:
        return kernels.varlen_attention(q_THA, k_PHA, v_PHV, seqs, layer.scale)
    part = kernels.varlen_attention_part(
        q_THA, k_PHA, v_PHV, seqs, layer.scale, is_causal=is_causal
    )
    return kernels.merge_attention(*part, *part)[0]


def _invent_rows(count: int, matrix: Matrix) -> Fp8Rows:
    codec, weight = matrix.number_format.rows, matrix.weight
    assert codec is not None
    shape = (count, weight.shape[-1])
    return codec.quantize_rows(torch.randn(shape, device=weight.device, dtype=torch.bfloat16))
