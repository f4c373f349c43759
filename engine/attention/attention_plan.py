"""Which sequences of a step attend together, and in which of MLA's two forms.

Decompressed: expand the latents of the context to per-head keys and values, once, then attend with
heads of N + R and V numbers. Absorbed: absorb W_UK into the queries and attend there
with C + R numbers, without expanding anything. The first pays per context token, the second per
(query, context) pair; so few queries want the absorbed form and long chunks the decompressed one.
The plan is made once a step and used by every layer. How absorbed sequences attend together is in
`absorbed_groups`. Where the kernels read pages through block tables, a step of single queries needs
no groups at all, and its plan (`plan_decode`) reads nothing on the host.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from engine.asking_rows import AskingRows
from engine.attention.absorbed_groups import (
    AbsorbedGroup,
    PagedGroup,
    PlanPages,
    build_groups,
    group_arrays,
    plan_paged_groups,
    split_alike,
    split_for_room,
)
from engine.attention.attention_rule import AttentionRule
from engine.attention.kernels import AttentionKernels, VarlenLengths
from engine.attention.latent_storage import take_blocks
from engine.attention.paged_queries import PagedQueries, QueryCounts
from engine.attention.planned_sequence import (
    PlannedSequence,
    adjacent_rows,
    all_rows,
    plan_sequences,
)
from engine.attention.scratch import Scratch
from engine.batch import ForwardBatch
from engine.host_copy import Array, upload
from engine.memory.kv_pool import KVPool
from engine.parallel.token_sharding import RowCount


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
class AttentionPlan:
    """Every row of the step is in exactly one segment or group.

    Attributes:
        segments: sequences in the decompressed form.
        paged_groups: sequences in the absorbed form, by block tables; then there are no `groups`.
        groups: sequences in the absorbed form, by the reference.
        absorbed_rows: rows of the step that are in `groups`, in their order; a slice where they
            are adjacent.
        paged: all rows of the step, one a sequence; then there is nothing else.
    """

    segments: tuple[DecompressedSegment, ...] = ()
    paged_groups: tuple[PagedGroup, ...] = ()
    groups: tuple[AbsorbedGroup, ...] = ()
    absorbed_rows: slice | Tensor = field(default_factory=lambda: slice(0, 0))
    paged: PagedQueries | None = None

    def paged_whole(self, num_tokens: int) -> PagedQueries | None:
        """Return the queries of a step of so many rows that all attend by block tables in one call.

        They are the rows as they stand, so each row's small steps can be fused around the call.
        """
        if self.paged is not None or len(self.paged_groups) != 1 or self.segments or self.groups:
            return self.paged
        (group,) = self.paged_groups
        return group.queries if group.rows == slice(0, num_tokens) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """What layers need beside the hidden states: the same object for all layers of a step.

    All but `num_rows`, of this rank's own rows, is for attention. Where only some rows are
    `asking`, all are stored and attend; what is behind attention has these alone, and
    `num_rows` is of them.
    """

    plan: AttentionPlan
    slot_mapping: Tensor
    cos: Tensor
    sin: Tensor
    kv_pool: KVPool
    scratch: Scratch
    num_rows: RowCount = None
    asking: AskingRows | None = None

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


def plan_attention(
    batch: ForwardBatch,
    block_size: int,
    rule: AttentionRule,
    *,
    max_positions: int = 0,
    plan_pages: PlanPages | None = None,
) -> AttentionPlan:
    """Choose a form for every sequence and group those that attend together.

    Reads the batch's lengths where they are kept on the host; what is planned is copied to the
    device, and nobody waits for it.

    Args:
        batch: of the step.
        block_size: tokens per block.
        rule: of the choice.
        max_positions: context tokens that are decompressed in one call. A sequence with more is
            alone and attends to its prefix in parts; if 0, every one is alone and whole.
        plan_pages: of the kernels, where they attend by block tables.
    """
    assert len(batch.lengths) == batch.num_seqs
    sequences = list(plan_sequences(batch.lengths, block_size))
    absorbed = [s for s in sequences if rule.takes_absorbed(s.num_queries, s.num_positions)]
    taken = {s.index for s in absorbed}
    others = (s for s in sequences if s.index not in taken)
    runs = [
        list(_parts(run, max_positions, block_size)) for run in _neighbours(others, max_positions)
    ]
    paged_groups: tuple[PagedGroup, ...] = ()
    if plan_pages is not None:
        cut = list(split_for_room(absorbed, rule.tokens_at_once(), block_size))
        paged_groups = plan_paged_groups(cut, batch.block_tables, plan_pages)
    groups = list(split_alike(absorbed, block_size)) if plan_pages is None else []
    gathered = [s for group in groups for s in group]
    arrays = [
        *chain.from_iterable(_part_arrays(part, block_size) for run in runs for part in run),
        *chain.from_iterable(group_arrays(group, block_size) for group in groups),
        all_rows(gathered),
    ]
    tables = batch.block_tables.long()
    tensors = iter(upload(arrays, tables.device))
    return AttentionPlan(
        segments=tuple(_segment(run, tables, tensors, block_size) for run in runs),
        paged_groups=paged_groups,
        groups=tuple(build_groups(groups, tables, block_size, rule, tensors)),
        absorbed_rows=adjacent_rows(gathered) or next(tensors),
    )


def plan_decode(
    batch: ForwardBatch, kernels: AttentionKernels, cache: Tensor, num_heads: int
) -> AttentionPlan:
    """Plan a step in which every sequence runs one token, without reading the device.

    Args:
        batch: of the step.
        kernels: that will attend.
        cache: [num_blocks, block_size, L], any layer of the pool.
        num_heads: H of this rank.
    """
    assert batch.max_seqlen_q == 1
    queries = PagedQueries(block_tables_SB=batch.block_tables, seq_lens_S=batch.seq_lens)
    return AttentionPlan(paged=kernels.plan_paged(queries, cache, num_heads))


def plan_suffixes(
    batch: ForwardBatch, kernels: AttentionKernels, cache: Tensor, num_heads: int
) -> AttentionPlan:
    """Plan a step of fixed shape with several queries a sequence, without reading the device.

    All rows attend in the absorbed form, in one group.

    Args:
        batch: of the step; its `max_seqlen_q` holds for whatever lengths come.
        kernels: that will attend.
        cache: [num_blocks, block_size, L], any layer of the pool.
        num_heads: H of this rank.
    """
    counts = QueryCounts(
        cu_seqlens_q=batch.cu_seqlens_q, most=batch.max_seqlen_q, total=batch.num_tokens
    )
    queries = PagedQueries(
        block_tables_SB=batch.block_tables, seq_lens_S=batch.seq_lens, counts=counts
    )
    planned = kernels.plan_paged(queries, cache, num_heads)
    group = PagedGroup(rows=slice(0, batch.num_tokens), queries=planned)
    return AttentionPlan(paged_groups=(group,))


def plan_prompts(batch: ForwardBatch, *, reads_lengths: bool) -> AttentionPlan:
    """Plan a step of prompts of fixed shape, in one segment of the decompressed form.

    Args:
        batch: of the step, whose prompts follow one another, padding as one more of them.
        reads_lengths: whether attention wants lengths on the host, for which the host then waits;
            else it is told the most that there may be.
    """
    prompts = batch.prompts
    assert prompts is not None
    kept, lengths = prompts.kept, [(batch.num_tokens, prompts.kept.shape[0])]
    if reads_lengths:
        sums = batch.cu_seqlens_q, prompts.cu_seqlens_k
        pairs = zip(*(each.diff().tolist() for each in sums), strict=True)
        lengths = [pair for pair in pairs if pair[0]]
        kept = kept[: sum(positions for _, positions in lengths)]
    seqs = VarlenLengths(
        lengths=lengths, cu_seqlens_q=batch.cu_seqlens_q, cu_seqlens_k=prompts.cu_seqlens_k
    )
    part = ContextPart(block_ids=prompts.block_ids, kept=kept, seqs=seqs)
    segment = DecompressedSegment(rows=slice(0, batch.num_tokens), parts=(part,))
    return AttentionPlan(segments=(segment,))


def read_lengths(batch: ForwardBatch) -> ForwardBatch:
    """Return a step of fixed shape with its lengths on the host, for which the host waits.

    Sequences without a query, which are the last ones, are left out.
    """
    queries = batch.cu_seqlens_q.diff().tolist()
    pairs = zip(queries, batch.seq_lens.tolist(), strict=True)
    lengths = tuple(pair for pair in pairs if pair[0])
    count = len(lengths)
    return replace(
        batch,
        lengths=lengths,
        cu_seqlens_q=batch.cu_seqlens_q[: count + 1],
        seq_lens=batch.seq_lens[:count],
        block_tables=batch.block_tables[:count],
    )


def join_rows(batch: ForwardBatch) -> ForwardBatch:
    """Return a step of single queries in which rows of one sequence are several queries of it.

    A step that verifies drafts has each row as a sequence. A row that is one position longer than
    the row before it, with the same blocks, is of the same: the last block of a table is nobody
    else's. Where latents are gathered, they are gathered once then.

    Args:
        batch: with lengths of one query each.
    """
    tables, firsts = batch.block_tables, []
    for row, (_, num_positions) in enumerate(batch.lengths):
        continues = row > 0 and num_positions == batch.lengths[row - 1][1] + 1
        if not (continues and torch.equal(tables[row], tables[row - 1])):
            firsts.append(row)
    if len(firsts) == len(batch.lengths):
        return batch
    ends = [*firsts[1:], len(batch.lengths)]
    lengths = tuple(
        (end - first, batch.lengths[end - 1][1]) for first, end in zip(firsts, ends, strict=True)
    )
    return replace(
        batch,
        lengths=lengths,
        cu_seqlens_q=batch.cu_seqlens_q[[*firsts, -1]],
        seq_lens=batch.seq_lens[[end - 1 for end in ends]],
        block_tables=tables[firsts],
        max_seqlen_q=max(queries for queries, _ in lengths),
    )


def _neighbours(
    sequences: Iterable[PlannedSequence], max_positions: int
) -> Iterator[list[PlannedSequence]]:
    """Split into runs of adjacent sequences with at most `max_positions` in all, or of one."""
    run: list[PlannedSequence] = []
    for s in sequences:
        total = sum(other.num_positions for other in run) + s.num_positions
        if run and (s.index != run[-1].index + 1 or total > max_positions):
            yield run
            run = []
        run.append(s)
    if run:
        yield run


def _parts(
    run: list[PlannedSequence], max_positions: int, block_size: int
) -> Iterator[list[PlannedSequence]]:
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


def _part_arrays(run: list[PlannedSequence], block_size: int) -> Iterator[Array]:
    """Yield what `_part` needs on the device: running sums, and the gathered rows it keeps."""
    lengths = np.array([(0, 0), *((s.num_queries, s.num_positions) for s in run)])
    ends = lengths.cumsum(axis=0).astype(np.int32)
    yield ends[:, 0]
    yield ends[:, 1]
    if not _has_no_gaps(run, block_size):
        firsts = accumulate((s.num_blocks * block_size for s in run), initial=0)
        ranges = [np.arange(a, a + s.num_positions) for a, s in zip(firsts, run, strict=False)]
        yield np.concatenate(ranges)


def _has_no_gaps(run: list[PlannedSequence], block_size: int) -> bool:
    """Return whether the positions of all sequences lie behind one another in their blocks."""
    return all(s.num_positions == s.num_blocks * block_size for s in run[:-1])


def _segment(
    parts: list[list[PlannedSequence]],
    tables: Tensor,
    tensors: Iterator[Tensor],
    block_size: int,
) -> DecompressedSegment:
    first, last = parts[0][0], parts[0][-1]
    return DecompressedSegment(
        rows=slice(first.start, last.start + last.num_queries),
        parts=tuple(_part(run, tables, tensors, block_size) for run in parts),
    )


def _part(
    run: list[PlannedSequence], tables: Tensor, tensors: Iterator[Tensor], block_size: int
) -> ContextPart:
    seqs = VarlenLengths(
        lengths=[(s.num_queries, s.num_positions) for s in run],
        cu_seqlens_q=next(tensors),
        cu_seqlens_k=next(tensors),
    )
    num_positions = sum(s.num_positions for s in run)
    tables_of = [tables[s.index, s.first_block : s.first_block + s.num_blocks] for s in run]
    return ContextPart(
        block_ids=torch.cat(tables_of),
        kept=slice(0, num_positions) if _has_no_gaps(run, block_size) else next(tensors),
        seqs=seqs,
    )
