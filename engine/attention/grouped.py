"""Grouped-query attention to a paged pool in plain PyTorch: the reference, and what a CPU runs.

H query heads share G key-value heads, H / G each, and with G = H every head has its own. A token
leaves its rotated key and its value side by side, 2 D numbers a head, and heads lie apart in a
block, so a rank of some heads has one run of memory in each layer of a block. Sequences attend one
after another, over their blocks gathered. A step of fixed shape is planned by reading its lengths
from the device, which no graph can hold.

Legend: T tokens of the step, H query heads and G key-value heads of this rank, D head size, P
context positions, q queries of one sequence, b blocks of one.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.kv_spec import KVSpec
from engine.batch import ForwardBatch
from engine.kernels.latent_storage import take_blocks, to_storage
from engine.layers.planned_sequence import plan_sequences
from engine.memory.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysValues:
    """What a layer leaves for the T tokens of a step.

    Attributes:
        keys_TGD: [T, G, D], rotated.
        values_TGD: [T, G, D].
    """

    keys_TGD: Tensor
    values_TGD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSequence:
    """One sequence of a step.

    Attributes:
        rows: of the step.
        num_positions: P, the last ones being the queries' own.
        block_ids: [b] int64, that hold them.
        visible_qP: [q, P] bool, what each query attends to; None for a single query, which sees
            all.
    """

    rows: slice
    num_positions: int
    block_ids: Tensor
    visible_qP: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedStep:
    """What all layers of a step share.

    Attributes:
        sequences: whose rows follow one another.
        slot_mapping: [T] int64, where each token goes.
        kv_pool: that is written and read.
    """

    sequences: tuple[GroupedSequence, ...]
    slot_mapping: Tensor
    kv_pool: KVPool


class GroupedAttention:
    """See the module; an `AttentionBackend[GroupedStep, KeysValues, Tensor]`."""

    def __init__(self, kv_spec: KVSpec, scale: float) -> None:
        """Take what this rank keeps of a token, and the factor of scores."""
        assert kv_spec.is_split, kv_spec
        assert kv_spec.head_width % 2 == 0, kv_spec
        self._kv_spec, self._scale = kv_spec, scale

    @property
    def kv_spec(self) -> KVSpec:
        """See `AttentionBackend`."""
        return self._kv_spec

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> GroupedStep:
        """See `AttentionBackend`."""
        # A step of fixed shape runs one token a sequence, and keeps its lengths on the device.
        lengths = batch.lengths or [(1, length) for length in batch.seq_lens.tolist()]
        tables = batch.block_tables.long()
        planned = plan_sequences(lengths, kv_pool.block_size)
        sequences = tuple(
            GroupedSequence(
                rows=slice(s.start, s.start + s.num_queries),
                num_positions=s.num_positions,
                block_ids=tables[s.index, : s.num_blocks],
                visible_qP=_visible(s.num_queries, s.num_positions, tables.device),
            )
            for s in planned
        )
        return GroupedStep(sequences=sequences, slot_mapping=batch.slot_mapping, kv_pool=kv_pool)

    def store(self, stored: KeysValues, layer_index: int, step: GroupedStep) -> None:
        """See `AttentionBackend`."""
        cache = step.kv_pool.layer(layer_index)
        rows = to_storage(torch.cat((stored.keys_TGD, stored.values_TGD), dim=-1), cache.dtype)
        if cache.dtype.itemsize == 1:  # not every device indexes e4m3
            cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
        blocks = torch.div(step.slot_mapping, step.kv_pool.block_size, rounding_mode="floor")
        cache[blocks, :, step.slot_mapping % step.kv_pool.block_size] = rows

    def attend(self, queries: Tensor, layer_index: int, step: GroupedStep) -> Tensor:
        """See `AttentionBackend`; for rotated queries [T, H, D]."""
        cache, out_THD = step.kv_pool.layer(layer_index), torch.empty_like(queries)
        for sequence in step.sequences:
            keys_GPD, values_GPD = _gather(cache, sequence, queries.dtype)
            attended_HqD = F.scaled_dot_product_attention(
                queries[sequence.rows].transpose(0, 1).unsqueeze(0),
                keys_GPD.unsqueeze(0),
                values_GPD.unsqueeze(0),
                attn_mask=sequence.visible_qP,
                scale=self._scale,
                enable_gqa=True,
            )
            out_THD[sequence.rows] = attended_HqD[0].transpose(0, 1)
        return out_THD.flatten(1)


def _visible(num_queries: int, num_positions: int, device: torch.device) -> Tensor | None:
    """Return which positions each query sees: those up to its own, the last being the last's."""
    if num_queries == 1:
        return None
    ones = torch.ones(num_queries, num_positions, dtype=torch.bool, device=device)
    return ones.tril(num_positions - num_queries)


def _gather(cache: Tensor, sequence: GroupedSequence, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values [G, P, D] of a sequence from [num_blocks, G, block_size, 2 D]."""
    blocks_bGSX = take_blocks(cache, sequence.block_ids)
    heads_GPX = blocks_bGSX.transpose(0, 1).flatten(1, 2)[:, : sequence.num_positions].to(dtype)
    keys_GPD, values_GPD = heads_GPX.chunk(2, dim=-1)
    return keys_GPD, values_GPD
