"""The tensors of one step: what the model's forward reads, ragged over requests.

`build_forward_batch` turns the scheduler's plan into a `ForwardBatch`; `pack_forward_batch` does
the second half from arrays, for a rank that got the plan as a message and holds no requests. All
index arithmetic is numpy over whole arrays, because a decode step has well under a millisecond to
spare for it; then one copy moves everything to the device, and nobody waits for it. Tensors are
read-only once built.

Letters in shapes: T tokens of the step, S requests, B blocks of the longest context, L rows whose
logits are wanted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.host_copy import upload
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.sampling.accepted import AcceptedTokens
from runtime.errors import InternalError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBlocks:
    """Where the latents lie that a step of prompts of fixed shape attends to.

    Attributes:
        block_ids: [b] int64, blocks of all prompts, then the dummy block as often as is left.
        kept: [P] int64, where each position lies in these blocks, [b * block_size] slots.
        cu_seqlens_k: [S + 1] int32, running sum of the positions per request.
    """

    block_ids: torch.Tensor
    kept: torch.Tensor
    cu_seqlens_k: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Inputs of one forward pass. Request s owns rows [cu_seqlens_q[s], cu_seqlens_q[s + 1]).

    Attributes:
        input_ids: [T] int64, tokens to run.
        positions: [T] int64, position of each token in its own sequence.
        slot_mapping: [T] int64, where a token's KV goes: block_id * block_size + offset.
        cu_seqlens_q: [S + 1] int32, running sum of the tokens per request.
        seq_lens: [S] int32, context length of each request including this step's tokens.
        block_tables: [S, B] int32, block ids in order of positions; padded with block 0.
        logits_indices: [L] int64, ascending rows of [0, T) whose logits are wanted.
        max_seqlen_q: the most tokens of one request in this step (1: a pure decode step); in
            steps of fixed shape the most that there may be.
        lengths: per request its tokens in this step and its context length, on the host, so that
            planning reads nothing from the device; empty in steps of fixed shape, whose lengths
            the host does not look at.
        num_rows: [1] int64 on the device, how many of the tokens, the first ones, are somebody's;
            the others are padding, and go to no expert. None where all are.
        prompts: in steps of prompts of fixed shape, which have no block tables; else None.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_indices: torch.Tensor
    max_seqlen_q: int
    lengths: tuple[tuple[int, int], ...] = ()
    num_rows: torch.Tensor | None = None
    prompts: PromptBlocks | None = None

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.input_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        """S."""
        return self.seq_lens.shape[0]

    @property
    def is_short(self) -> bool:
        """Whether kernels are short: one token of each request, or a fixed shape of suffixes."""
        return self.max_seqlen_q == 1 or (self.num_rows is not None and self.prompts is None)

    @classmethod
    def dummy(cls, device: torch.device | str = "cpu") -> "ForwardBatch":
        """Return what an idle expert-parallel rank runs to take part in the collectives.

        One padding token at position 0, whose KV goes to block 0 (the dummy block, which no
        request owns), and which goes to no expert; no logits are wanted.
        """
        one = np.ones(1, dtype=np.int64)
        batch = pack_forward_batch(
            np.zeros(1, dtype=np.int64),
            one,
            one,
            np.zeros((1, 1), dtype=np.int32),
            logits_indices=np.zeros(0, dtype=np.int64),
            block_size=1,
            device=device,
        )
        return replace(batch, num_rows=torch.zeros(1, dtype=torch.int64, device=device))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadTokens:
    """Tokens that the step before has sampled and the host has not read.

    Attributes:
        token_ids: [P] int64 on the device, as sampled.
        places: by `id` of a request, which of them is its last token.
        accepted: all tokens of the same requests, where a step verified drafts: 1 or more each.
    """

    token_ids: torch.Tensor
    places: Mapping[int, int]
    accepted: AcceptedTokens | None = None

    def amounts(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [r] int64 of a request, and how often each counts as output, [r] int64."""
        place = self.places[id(request)]
        if self.accepted is not None:
            return self.accepted.amounts(place)
        last = self.token_ids[place : place + 1]
        return last, torch.ones_like(last)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """What the requests of a step may name; ids beyond it would address memory of others.

    Attributes:
        num_blocks: of the KV pool.
        vocab_size: rows of the embedding.
    """

    num_blocks: int
    vocab_size: int

    def check_step(
        self, scheduled: Sequence[ScheduledRequest], token_ids: Int64Array, tables: Int32Array
    ) -> None:
        """Refuse a step of [T] tokens and block tables [S, B]; see the other two."""
        if _are_below(token_ids, self.vocab_size) and _are_below(tables, self.num_blocks):
            return
        for item in scheduled:
            self.check_tokens(item.request, item.request.token_ids(item.start, item.end))
            self.check_blocks(item.request, item.request.block_table)

    def check_blocks(self, request: Request, block_ids: Sequence[int]) -> None:
        """Refuse block ids that the pool does not have.

        Raises:
            InternalError: names the request; the books of whoever scheduled it are wrong.
        """
        self._check(request, "KV block", block_ids, self.num_blocks)

    def check_tokens(self, request: Request, token_ids: Sequence[int]) -> None:
        """Refuse token ids that the embedding does not have.

        Raises:
            InternalError: names the request; it was not checked when it was taken on.
        """
        self._check(request, "token", token_ids, self.vocab_size)

    def _check(self, request: Request, kind: str, ids: Sequence[int], end: int) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < end):
            bad = next(number for number in ids if not 0 <= number < end)
            raise InternalError(
                f"request {request.request_id!r} has {kind} {bad}, and there are 0..{end - 1}",
                request_id=request.request_id,
            )


def build_forward_batch(
    scheduled: Sequence[ScheduledRequest],
    block_size: int,
    device: torch.device | str = "cpu",
    *,
    unread: UnreadTokens | None = None,
    bounds: StepBounds | None = None,
) -> ForwardBatch:
    """Build the tensors of one step on `device`.

    Args:
        scheduled: at least one; each `block_table` must already cover the step's tokens.
        block_size: tokens per block.
        device: where the tensors are to be.
        unread: must hold the last token of every item with `num_unread`.
        bounds: of what the step may name; None where nobody else's memory is at stake.

    Raises:
        InternalError: a request names a block or a token beyond the bounds.
    """
    assert scheduled, "a step without requests is ForwardBatch.dummy()"
    input_ids: list[int] = []
    for item in scheduled:
        input_ids += item.request.token_ids(item.start, item.end)
        input_ids += [0] * item.num_unread  # replaced on the device
    ids = np.array(input_ids, dtype=np.int64)
    block_tables = _pad_block_tables(scheduled, block_size)
    if bounds is not None:
        bounds.check_step(scheduled, ids, block_tables)
    return pack_forward_batch(
        ids,
        np.array([item.num_scheduled_tokens for item in scheduled], dtype=np.int64),
        np.array([item.end for item in scheduled], dtype=np.int64),
        block_tables,
        logits_indices=logits_rows(scheduled),
        block_size=block_size,
        device=device,
        unread=_unread_sources(scheduled, unread),
    )


def pack_forward_batch(
    input_ids: Int64Array,
    query_lens: Int64Array,
    seq_lens: Int64Array,
    block_tables: Int32Array,
    *,
    logits_indices: Int64Array,
    block_size: int,
    device: torch.device | str = "cpu",
    unread: tuple[torch.Tensor, Int64Array] | None = None,
) -> ForwardBatch:
    """Derive positions and slots and move everything to `device`.

    Args:
        input_ids: [T], tokens of all requests one after another.
        query_lens: [S], tokens of each request in this step.
        seq_lens: [S], context lengths including this step.
        block_tables: [S, B], padded with 0.
        logits_indices: [L], ascending rows whose logits are wanted.
        block_size: tokens per block.
        device: where the tensors are to be.
        unread: [P] int64 tokens on the device, and [T] for each row which of them it runs; -1 for
            the row's own `input_ids`.
    """
    cu_seqlens = np.zeros(len(query_lens) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=cu_seqlens[1:])
    assert cu_seqlens[-1] == len(input_ids)
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    # Row t of request s stands at seq_lens[s] - query_lens[s] + (t - cu_seqlens[s]).
    shift = seq_lens - query_lens - cu_seqlens[:-1]
    positions = np.arange(len(input_ids), dtype=np.int64) + shift[rows]
    blocks = block_tables[rows, positions // block_size].astype(np.int64)

    arrays: list[npt.NDArray[np.generic]] = [
        input_ids,
        positions,
        blocks * block_size + positions % block_size,
        logits_indices,
        cu_seqlens.astype(np.int32),
        seq_lens.astype(np.int32),
        block_tables,
    ]
    if unread is not None:
        arrays.append(unread[1])
    ids, *rest = upload(arrays, device)
    if unread is not None:
        sources = rest.pop()
        ids = torch.where(sources < 0, ids, unread[0][sources.clamp(min=0)])
    return ForwardBatch(
        input_ids=ids,
        positions=rest[0],
        slot_mapping=rest[1],
        logits_indices=rest[2],
        cu_seqlens_q=rest[3],
        seq_lens=rest[4],
        block_tables=rest[5],
        max_seqlen_q=int(query_lens.max(initial=0)),
        lengths=tuple(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)),
    )


def logits_rows(scheduled: Sequence[ScheduledRequest]) -> Int64Array:
    """Return the ascending rows of the step whose logits are wanted, [L].

    Those are, per request, the rows that predict prompt tokens if prompt logprobs were asked for,
    and the last row if the step samples.
    """
    rows: list[int] = []
    first = 0
    for item in scheduled:
        rows.extend(range(first, first + item.num_prompt_logprob_rows))
        first += item.num_scheduled_tokens
        if item.samples:
            rows.append(first - 1)
    return np.array(rows, dtype=np.int64)


def sampled_rows(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    """Return the rows of the step that a token is sampled at."""
    rows: list[int] = []
    end = 0
    for item in scheduled:
        end += item.num_scheduled_tokens
        if item.samples:
            rows.append(end - 1)
    return rows


def _are_below(ids: npt.NDArray[np.integer[Any]], end: int) -> bool:
    return not ids.size or bool(ids.min() >= 0 and ids.max() < end)


def _unread_sources(
    scheduled: Sequence[ScheduledRequest], unread: UnreadTokens | None
) -> tuple[torch.Tensor, Int64Array] | None:
    """Return the sampled tokens and, for each row of the step, which of them it runs or -1."""
    if not any(item.num_unread for item in scheduled):
        return None
    assert unread is not None, "tokens that the host does not know, and no step they come from"
    sources = np.full(sum(item.num_scheduled_tokens for item in scheduled), -1, dtype=np.int64)
    end = 0
    for item in scheduled:
        end += item.num_scheduled_tokens
        if item.num_unread:
            sources[end - 1] = unread.places[id(item.request)]
    return unread.token_ids, sources


def _pad_block_tables(scheduled: Sequence[ScheduledRequest], block_size: int) -> Int32Array:
    """Return [S, B] block ids, trimmed to the blocks that this step's contexts reach."""
    counts = np.array([num_blocks_for(item.end, block_size) for item in scheduled])
    for item, count in zip(scheduled, counts, strict=True):
        assert len(item.request.block_table) >= count, item.request.request_id
    tables = np.zeros((len(scheduled), int(counts.max())), dtype=np.int32)
    ids = chain.from_iterable(
        item.request.block_table[:count] for item, count in zip(scheduled, counts, strict=True)
    )
    flat = np.fromiter(ids, dtype=np.int32, count=int(counts.sum()))
    tables[np.arange(tables.shape[1]) < counts[:, None]] = flat
    return tables
