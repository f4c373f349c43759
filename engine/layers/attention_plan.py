"""Which sequences of a step attend together, and in which of MLA's two forms.

Decompressed: expand the latents of the context to per-head keys and values, once, then attend with
heads of N + R and V numbers. Absorbed: carry the queries into the latent space and attend there
with C + R numbers, without expanding anything. The first pays per context token, the second per
(query, context) pair; so few queries want the absorbed form and long chunks the decompressed one.
The plan is made once a step and used by every layer. The key idea: sequences with equally many
queries and similar contexts become one batched product, but only as long as their gathered latents
stay in the cache of a core. Where the kernels read pages through block tables, a step of single
queries needs no groups at all, and its plan (`plan_decode`) reads nothing on the host.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.host_copy import Array, upload
from engine.kernels.base import Kernels, VarlenLengths
from engine.kernels.latent_storage import take_blocks
from engine.kernels.paged_queries import PagedQueries
from engine.layers.scratch import Scratch
from engine.memory.kv_pool import KVPool

MAX_GROUP_TOKENS = 4096
"""Padded context tokens of one absorbed group; a longer sequence is a group of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """When the absorbed form is taken: when it costs less, by multiply-adds.

    Attributes:
        nope: N.
        rope: R.
        value: V.
        latent: C.
        absorbed_cost: how much dearer a multiply-add of the absorbed form is; 0 always takes the
            absorbed form, infinity never.
    """

    nope: int
    rope: int
    value: int
    latent: int
    absorbed_cost: float = 1.0

    @classmethod
    def of(cls, config: ModelConfig, *, absorbed_cost: float = 1.0) -> "AttentionRule":
        """Return the rule for a model's head sizes."""
        return cls(
            nope=config.qk_nope_head_dim,
            rope=config.qk_rope_head_dim,
            value=config.v_head_dim,
            latent=config.kv_lora_rank,
            absorbed_cost=absorbed_cost,
        )

    def takes_absorbed(self, num_queries: int, num_positions: int) -> bool:
        """Decide for a sequence that runs `num_queries` of its `num_positions` tokens.

        Costs are multiply-adds per head. A single query is always absorbed, so that decode steps
        have one shape.
        """
        if num_queries == 1 and self.absorbed_cost != float("inf"):
            return True
        expand = self.latent * (self.nope + self.value)
        pairs = num_queries * num_positions
        decompressed = num_positions * expand + pairs * (self.nope + self.rope + self.value)
        absorbed = num_queries * expand + pairs * (2 * self.latent + self.rope)
        return absorbed * self.absorbed_cost < decompressed


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """Positions that are expanded and attended to in one call.

    Attributes:
        block_ids: [b] int64, the blocks of all of them.
        kept: which of the gathered [b * block_size] rows are positions, in order.
        seqs: queries, and positions of this part, of each sequence.
    """

    block_ids: Tensor
    kept: slice | Tensor
    seqs: VarlenLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class DecompressedSegment:
    """Neighbouring sequences that attend together, or one whose context is too long for one call.

    Attributes:
        rows: of the step.
        parts: of the context, in order. The last one ends with the queries' own positions; those
            before it come before all queries, which see them whole.
    """

    rows: slice
    parts: tuple[ContextPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedGroup:
    """S sequences with Q queries each.

    Attributes:
        rows: S * Q consecutive rows among the absorbed ones (see `AttentionPlan.absorbed_rows`).
        num_queries: Q.
        block_ids: [S * b] int64; sequences with shorter contexts are padded with block 0.
        hidden_SQP: [S, Q, P] bool, true where a query must not see a position; P = b * block_size.
        unused_rows: [n] int64, rows of the gathered [S * P] that belong to no position of their
            sequence. A block's last owner may have left anything there, and a probability of 0
            times NaN is NaN.
    """

    rows: slice
    num_queries: int
    block_ids: Tensor
    hidden_SQP: Tensor
    unused_rows: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Every row of the step is in exactly one segment or group.

    Attributes:
        segments: sequences in the decompressed form.
        groups: sequences in the absorbed form.
        absorbed_rows: rows of the step that are absorbed, in the order of the groups; a slice
            where they are adjacent.
        paged: all rows of the step, one a sequence; then there is nothing else.
    """

    segments: tuple[DecompressedSegment, ...] = ()
    groups: tuple[AbsorbedGroup, ...] = ()
    absorbed_rows: slice | Tensor = field(default_factory=lambda: slice(0, 0))
    paged: PagedQueries | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """What layers need beside the hidden states: the same object for all layers of a step.

    All but `num_rows` (see `ForwardBatch`) is for attention.
    """

    plan: AttentionPlan
    slot_mapping: Tensor
    cos: Tensor
    sin: Tensor
    kv_pool: KVPool
    scratch: Scratch
    num_rows: Tensor | None = None

    def gather(self, layer_index: int, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the latents of blocks [b] as [b * block_size, L], valid until the next gather."""
        cache = self.kv_pool.layer(layer_index)
        if cache.dtype.itemsize == 1:
            return take_blocks(cache, block_ids).flatten(0, 1).to(dtype)
        out = self.scratch.take((block_ids.shape[0], *cache.shape[1:]), cache)
        torch.index_select(cache, 0, block_ids, out=out)
        return out.flatten(0, 1).to(dtype)

    def gather_group(self, layer_index: int, group: AbsorbedGroup, dtype: torch.dtype) -> Tensor:
        """Return the latents of a group as [S, P, L], zero where no position is."""
        latents = self.gather(layer_index, group.block_ids, dtype)
        latents.index_fill_(0, group.unused_rows, 0.0)
        return latents.view(*group.hidden_SQP.shape[::2], -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    index: int
    start: int
    num_queries: int
    num_positions: int
    num_blocks: int
    first_block: int = 0

    @property
    def rows(self) -> range:
        """Of the step."""
        return range(self.start, self.start + self.num_queries)


def plan_attention(
    batch: ForwardBatch, block_size: int, rule: AttentionRule, *, max_positions: int = 0
) -> AttentionPlan:
    """Choose a form for every sequence and group those that attend together.

    Reads the batch's lengths where they are kept on the host; one copy brings what is planned to
    the device, and nobody waits for it.

    Args:
        batch: of the step.
        block_size: tokens per block.
        rule: of the choice.
        max_positions: context tokens that are decompressed in one call. A sequence with more is
            alone and attends to its prefix in parts; if 0, every one is alone and whole.
    """
    assert len(batch.lengths) == batch.num_seqs
    sequences = list(_sequences(batch.lengths, block_size))
    absorbed = [s for s in sequences if rule.takes_absorbed(s.num_queries, s.num_positions)]
    taken = {s.index for s in absorbed}
    others = (s for s in sequences if s.index not in taken)
    runs = [
        list(_parts(run, max_positions, block_size)) for run in _neighbours(others, max_positions)
    ]
    groups = list(_alike(absorbed, block_size))
    rows = [row for group in groups for s in group for row in s.rows]
    arrays = [
        *chain.from_iterable(_part_arrays(part, block_size) for run in runs for part in run),
        *chain.from_iterable(_group_arrays(group, block_size) for group in groups),
        np.array(rows, dtype=np.int64),
    ]
    tables = batch.block_tables.long()
    tensors = iter(upload(arrays, tables.device))
    return AttentionPlan(
        segments=tuple(_segment(run, tables, tensors) for run in runs),
        groups=tuple(_build_groups(groups, tables, block_size, tensors)),
        absorbed_rows=_as_slice(rows) or next(tensors),
    )


def _sequences(lengths: Iterable[tuple[int, int]], block_size: int) -> Iterator[_Sequence]:
    start = 0
    for index, (num_queries, num_positions) in enumerate(lengths):
        num_blocks = -(-num_positions // block_size)
        yield _Sequence(
            index=index,
            start=start,
            num_queries=num_queries,
            num_positions=num_positions,
            num_blocks=num_blocks,
        )
        start += num_queries


def plan_decode(
    batch: ForwardBatch, kernels: Kernels, cache: Tensor, num_heads: int
) -> AttentionPlan:
    """Plan a step in which every sequence runs one token, without reading the device.

    Args:
        batch: of the step.
        kernels: that will attend.
        cache: [num_blocks, block_size, L], any layer of the pool.
        num_heads: H of this rank.
    """
    assert batch.max_seqlen_q == 1
    paged = kernels.plan_paged(batch.block_tables, batch.seq_lens, cache, num_heads)
    return AttentionPlan(paged=paged)


def _neighbours(sequences: Iterable[_Sequence], max_positions: int) -> Iterator[list[_Sequence]]:
    """Split into runs of adjacent sequences with at most `max_positions` in all, or of one."""
    run: list[_Sequence] = []
    for s in sequences:
        total = sum(other.num_positions for other in run) + s.num_positions
        if run and (s.index != run[-1].index + 1 or total > max_positions):
            yield run
            run = []
        run.append(s)
    if run:
        yield run


def _parts(run: list[_Sequence], max_positions: int, block_size: int) -> Iterator[list[_Sequence]]:
    """Split a long sequence's prefix into whole blocks, `max_positions` or fewer at a time."""
    size = max_positions // block_size
    s = run[0]
    first = 0
    if len(run) == 1 and size and s.num_positions > max_positions:
        while first + size <= (s.num_positions - s.num_queries) // block_size:
            yield [replace(s, first_block=first, num_blocks=size, num_positions=size * block_size)]
            first += size
    if not first:
        yield run
        return
    rest = s.num_positions - first * block_size
    yield [replace(s, first_block=first, num_blocks=s.num_blocks - first, num_positions=rest)]


def _part_arrays(run: list[_Sequence], block_size: int) -> Iterator[Array]:
    """Yield what `_part` needs on the device: running sums, and the gathered rows it keeps."""
    lengths = np.array([(0, 0), *((s.num_queries, s.num_positions) for s in run)])
    ends = lengths.cumsum(axis=0).astype(np.int32)
    yield ends[:, 0]
    yield ends[:, 1]
    if len(run) > 1:
        firsts = accumulate((s.num_blocks * block_size for s in run), initial=0)
        ranges = [np.arange(a, a + s.num_positions) for a, s in zip(firsts, run, strict=False)]
        yield np.concatenate(ranges)


def _segment(
    parts: list[list[_Sequence]], tables: Tensor, tensors: Iterator[Tensor]
) -> DecompressedSegment:
    first, last = parts[0][0], parts[0][-1]
    return DecompressedSegment(
        rows=slice(first.start, last.start + last.num_queries),
        parts=tuple(_part(run, tables, tensors) for run in parts),
    )


def _part(run: list[_Sequence], tables: Tensor, tensors: Iterator[Tensor]) -> ContextPart:
    seqs = VarlenLengths(
        lengths=[(s.num_queries, s.num_positions) for s in run],
        cu_seqlens_q=next(tensors),
        cu_seqlens_k=next(tensors),
    )
    tables_of = [tables[s.index, s.first_block : s.first_block + s.num_blocks] for s in run]
    return ContextPart(
        block_ids=torch.cat(tables_of),
        kept=slice(0, run[0].num_positions) if len(run) == 1 else next(tensors),
        seqs=seqs,
    )


def _alike(sequences: Iterable[_Sequence], block_size: int) -> Iterator[list[_Sequence]]:
    """Split into groups of equal Q, at most twofold padding, and at most MAX_GROUP_TOKENS."""

    def kind(s: _Sequence) -> tuple[int, int]:
        return s.num_queries, s.num_blocks.bit_length()

    for _, alike in groupby(sorted(sequences, key=kind), key=kind):
        group: list[_Sequence] = []
        longest = 0
        for s in alike:
            longest = max(longest, s.num_blocks)
            if group and (len(group) + 1) * longest * block_size > MAX_GROUP_TOKENS:
                yield group
                group, longest = [], s.num_blocks
            group.append(s)
        yield group


def _group_arrays(sequences: list[_Sequence], block_size: int) -> Iterator[Array]:
    """Yield what `_build_groups` needs on the device, for one group.

    The rows of the block table, the position of each first query, and the unused rows.
    """
    width = max(s.num_blocks for s in sequences) * block_size
    num_positions = np.array([s.num_positions for s in sequences], dtype=np.int64)
    yield np.array([s.index for s in sequences], dtype=np.int64)
    yield num_positions - sequences[0].num_queries
    yield np.flatnonzero(np.arange(width) >= num_positions[:, None])


def _build_groups(
    groups: Iterable[list[_Sequence]], tables: Tensor, block_size: int, tensors: Iterator[Tensor]
) -> Iterator[AbsorbedGroup]:
    device, row = tables.device, 0
    for sequences in groups:
        chosen, first, unused_rows = next(tensors), next(tensors), next(tensors)
        num_queries = sequences[0].num_queries
        width = max(s.num_blocks for s in sequences)
        # Query q of a sequence sees the positions up to its own, num_positions - Q + q.
        own_SQ = first.unsqueeze(1) + torch.arange(num_queries, device=device)
        positions = torch.arange(width * block_size, device=device)
        num_rows = len(sequences) * num_queries
        yield AbsorbedGroup(
            rows=slice(row, row + num_rows),
            num_queries=num_queries,
            block_ids=tables[chosen, :width].flatten(),
            hidden_SQP=positions > own_SQ.unsqueeze(2),
            unused_rows=unused_rows,
        )
        row += num_rows


def _as_slice(rows: list[int]) -> slice | None:
    """Return the rows as a slice where they are adjacent (or none), else None."""
    if not rows:
        return slice(0, 0)
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[-1] + 1)
    return None
