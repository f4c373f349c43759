"""The senders of all ranks of the instance, as rank 0 uses them.

A command is applied to rank 0's own sender at once, and goes to the others with the next exchange.
Pushes are special: every rank makes them during the step that completes the blocks, so they travel
with the plan of that step. The answer to each exchange brings the others' closures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.batch import logits_rows
from engine.request import ScheduledRequest, num_blocks_for
from engine.step_error import StepError
from kv_transfer.metadata import MetadataRecord
from kv_transfer.ticket import PeerEndpoint, SendTicket
from prefill.commands import (
    AbandonTicket,
    FinishTicket,
    OpenTicket,
    PushBlocks,
    SenderCommand,
    encode_command,
)
from prefill.kv_push import BlockSender
from prefill.messages import RankClosed
from prefill.rank_plan import BatchArrays
from prefill.request import Chunk


class TicketSender(BlockSender, Protocol):
    """One rank's sender, in a worker `kv_transfer.sender.KVSender`. No method blocks; a ticket that
    is closed already is no error.

    Each opened ticket ends in one `Closure`, reported on a thread of the sender's.
    """

    def open(self, ticket: SendTicket, peer: PeerEndpoint) -> None:
        """Prepare to send under a ticket."""
        ...

    def finish(self, nonce: int, record: MetadataRecord | None) -> None:
        """Close once all pushes have landed; rank 0 also sends the record."""
        ...

    def abandon(self, nonce: int) -> None:
        """Drop what is not posted yet and close once the rest has landed."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What the other ranks say to a plan.

    Attributes:
        closed: by their senders, since the last time.
        refusal: why no rank runs the step; None where all do.
    """

    closed: Sequence[RankClosed] = ()
    refusal: StepError | None = None


class Followers(Protocol):
    """The other ranks, reached by collectives: every method blocks until they take part."""

    @property
    def num_followers(self) -> int:
        """Ranks besides rank 0."""
        ...

    def exchange(self, batch: BatchArrays | None, commands: bytes) -> Answer:
        """Send a step (or, without a batch, commands only)."""
        ...

    def stop(self) -> None:
        """Have the other ranks leave their loops."""
        ...


class SenderGroup:
    """Rank 0's own sender and, through `followers` (None: there are none), the others'."""

    def __init__(self, local: TicketSender, followers: Followers | None = None) -> None:
        self._local = local
        self._followers = followers
        self._outbox: list[SenderCommand] = []
        self._num_awaited = 0  # closures that followers owe

    @property
    def num_ranks(self) -> int:
        """Ranks that send, each its part."""
        return 1 + (self._followers.num_followers if self._followers else 0)

    @property
    def has_followers(self) -> bool:
        """Whether other ranks wait for our messages."""
        return self._followers is not None

    @property
    def wants_exchange(self) -> bool:
        """Whether followers have something to learn, or something to tell."""
        return bool(self._outbox) or self._num_awaited > 0

    @property
    def local(self) -> TicketSender:
        """Rank 0's own sender."""
        return self._local

    def open(self, command: OpenTicket) -> None:
        """Open a ticket on every rank."""
        self._local.open(command.ticket, command.peer)
        if self._followers:
            self._outbox.append(command)
            self._num_awaited += self._followers.num_followers

    def finish(self, nonce: int, record: MetadataRecord) -> None:
        """Close the ticket on every rank once all pushes have landed."""
        self._local.finish(nonce, record)
        if self._followers:
            self._outbox.append(FinishTicket(nonce))

    def abandon(self, nonce: int) -> None:
        """Close the ticket on every rank as soon as what is in flight has landed."""
        self._local.abandon(nonce)
        if self._followers:
            self._outbox.append(AbandonTicket(nonce))

    def announce(self, chunks: Sequence[Chunk], pushes: Sequence[PushBlocks]) -> Answer:
        """Tell the other ranks of the step that comes, if any, and hear from them."""
        if self._followers is None:
            return Answer()
        commands = b"".join(encode_command(command) for command in (*self._outbox, *pushes))
        self._outbox.clear()
        batch = None
        if chunks:
            batch = batch_arrays([chunk.scheduled for chunk in chunks], chunks[0].block_size)
        answer = self._followers.exchange(batch, commands)
        self._num_awaited -= len(answer.closed)
        return answer

    def stop(self) -> None:
        """Let the other ranks go."""
        if self._followers:
            self._followers.stop()


def batch_arrays(scheduled: Sequence[ScheduledRequest], block_size: int) -> BatchArrays:
    """Return a step as arrays, equal to what rank 0's own runner builds from the requests."""
    token_ids: list[int] = []
    for item in scheduled:
        token_ids += item.request.token_ids(item.start, item.end)
    counts = [num_blocks_for(item.end, block_size) for item in scheduled]
    tables = np.zeros((len(scheduled), max(counts)), dtype=np.int32)
    for row, (item, count) in enumerate(zip(scheduled, counts, strict=True)):
        tables[row, :count] = item.request.block_table[:count]
    return BatchArrays(
        input_ids=np.array(token_ids, dtype=np.int32),
        query_lens=np.array([item.num_scheduled_tokens for item in scheduled], dtype=np.int32),
        seq_lens=np.array([item.end for item in scheduled], dtype=np.int32),
        block_tables=tables,
        logits_indices=logits_rows(scheduled).astype(np.int32),
    )
