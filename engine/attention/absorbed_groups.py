"""Sequences that attend in the latent space together, and how many of their queries at a time.

Two ways. Where a kernel finds latents by block tables, a group is as many sequences as there is
room for their queries, whatever their lengths are; nothing is gathered, and no score is kept. The
reference multiplies gathered latents: there a group is sequences with equally many queries and
similar contexts, one batched product, but only as long as their latents stay in the cache of a
core; and all scores of some queries at a time.

Legend: S sequences of a group, Q queries of each, P positions, b blocks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from engine.attention.attention_rule import AttentionRule
from engine.attention.paged_queries import PagedQueries, QueryCounts
from engine.attention.planned_sequence import PlannedSequence, adjacent_rows, all_rows
from engine.host_copy import Array, upload

MAX_GROUP_TOKENS = 4096
"""Padded context tokens of one gathered group; a longer sequence is a group of its own."""

PlanPages = Callable[[PagedQueries], PagedQueries]
"""Adds what the kernels prepare once a step; see `AttentionKernels.plan_paged`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedGroup:
    """Sequences that are found by their block tables.

    Attributes:
        rows: of the step, those of the first sequence first.
        queries: what attention is told.
    """

    rows: slice | Tensor
    queries: PagedQueries


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedGroup:
    """S sequences with Q queries each, whose latents are gathered.

    Attributes:
        rows: S * Q consecutive rows among the absorbed ones (see `AttentionPlan.absorbed_rows`).
        num_queries: Q.
        num_at_once: of the Q queries, whose scores are kept at a time.
        block_ids: [S * b] int64; sequences with shorter contexts are padded with block 0.
        hidden_SQP: [S, Q, P] bool, true where a query must not see a position; P = b * block_size.
        unused_rows: [n] int64, rows of the gathered [S * P] that belong to no position of their
            sequence. A block's last owner may have left anything there, and a probability of 0
            times NaN is NaN.
    """

    rows: slice
    num_queries: int
    num_at_once: int
    block_ids: Tensor
    hidden_SQP: Tensor
    unused_rows: Tensor


def split_for_room(
    sequences: Iterable[PlannedSequence], num_tokens: int, block_size: int
) -> Iterator[list[PlannedSequence]]:
    """Split into runs of at most `num_tokens` queries; a longer sequence is cut between queries."""
    run: list[PlannedSequence] = []
    room = num_tokens
    for s in sequences:
        left = s.num_queries
        while left:
            if not room:
                yield run
                run, room = [], num_tokens
            count = min(left, room)
            left, room = left - count, room - count
            num_positions = s.num_positions - left
            run.append(
                replace(
                    s,
                    start=s.start + s.num_queries - left - count,
                    num_queries=count,
                    num_positions=num_positions,
                    num_blocks=-(-num_positions // block_size),
                )
            )
    if run:
        yield run


def plan_paged_groups(
    runs: Sequence[list[PlannedSequence]], tables: Tensor, plan_pages: PlanPages
) -> tuple[PagedGroup, ...]:
    """Plan each run of sequences as a group.

    Args:
        runs: of `split_for_room`.
        tables: [sequences of the step, B] int32.
        plan_pages: of the kernels.
    """
    arrays = [array for run in runs for array in _paged_arrays(run)]
    tensors = iter(upload(arrays, tables.device))
    groups = []
    for run in runs:
        chosen, seq_lens, cu_seqlens_q, rows = (next(tensors) for _ in range(4))
        own = tables[chosen, : max(s.num_blocks for s in run)]
        counts = QueryCounts(
            cu_seqlens_q=cu_seqlens_q,
            most=max(s.num_queries for s in run),
            lengths=[(s.num_queries, s.num_positions) for s in run],
            total=sum(s.num_queries for s in run),
        )
        groups.append(
            PagedGroup(
                rows=adjacent_rows(run) or rows,
                queries=plan_pages(
                    PagedQueries(block_tables_SB=own, seq_lens_S=seq_lens, counts=counts)
                ),
            )
        )
    return tuple(groups)


def _paged_arrays(run: list[PlannedSequence]) -> Iterator[Array]:
    """Yield what a group needs on the device: table rows, lengths, starts of queries, rows."""
    yield np.array([s.index for s in run], dtype=np.int64)
    yield np.array([s.num_positions for s in run], dtype=np.int32)
    yield np.array(list(accumulate((s.num_queries for s in run), initial=0)), dtype=np.int32)
    yield all_rows(run)


def split_alike(
    sequences: Iterable[PlannedSequence], block_size: int
) -> Iterator[list[PlannedSequence]]:
    """Split into groups of equal Q, at most twofold padding, and at most MAX_GROUP_TOKENS."""

    def kind(s: PlannedSequence) -> tuple[int, int]:
        return s.num_queries, s.num_blocks.bit_length()

    for _, alike in groupby(sorted(sequences, key=kind), key=kind):
        group: list[PlannedSequence] = []
        longest = 0
        for s in alike:
            longest = max(longest, s.num_blocks)
            if group and (len(group) + 1) * longest * block_size > MAX_GROUP_TOKENS:
                yield group
                group, longest = [], s.num_blocks
            group.append(s)
        yield group


def group_arrays(sequences: list[PlannedSequence], block_size: int) -> Iterator[Array]:
    """Yield what `build_groups` needs on the device, for one group.

    The rows of the block table, the position of each first query, and the unused rows.
    """
    width = max(s.num_blocks for s in sequences) * block_size
    num_positions = np.array([s.num_positions for s in sequences], dtype=np.int64)
    yield np.array([s.index for s in sequences], dtype=np.int64)
    yield num_positions - sequences[0].num_queries
    yield np.flatnonzero(np.arange(width) >= num_positions[:, None])


def build_groups(
    groups: Iterable[list[PlannedSequence]],
    tables: Tensor,
    block_size: int,
    rule: AttentionRule,
    tensors: Iterator[Tensor],
) -> Iterator[AbsorbedGroup]:
    """Yield the groups, in order, from their arrays on the device."""
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
            num_at_once=rule.queries_at_once(len(sequences) * width * block_size),
            block_ids=tables[chosen, :width].flatten(),
            hidden_SQP=positions > own_SQ.unsqueeze(2),
            unused_rows=unused_rows,
        )
        row += num_rows
