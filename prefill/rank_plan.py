"""The message of one step from rank 0 to the other ranks of its group, and their answer. Pure.

Only rank 0 has requests. The others get, before every step, one message whose size never changes:
the arrays of the step's batch, then an area of bytes that carries a piece of the stream of sender
commands (see `prefill.commands`). They answer with a row of fixed size that tells which tickets
their senders have closed. Fixed shapes mean that no rank can ever enter a collective with another
size than its peers; the epoch and the step number say at once if one fell out of step.

A message without a batch moves commands or is a heartbeat, so that an idle group does not run into
the timeout of its collectives.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.experts.votes import NO_WORD, Vote, Word
from runtime.errors import ErrorCode, InternalError

Int32Array = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.uint8]

_HEADER = struct.Struct("<QQIIIIII")  # epoch, step, kind, tokens, requests, blocks, logits, bytes
_ROW_HEADER = struct.Struct("<QQI?B2xQQ")  # epoch, step, closures, if it cannot run the step; vote,
# placement and turn of its experts
_CLOSURE = struct.Struct("<QB?HIQIdddd96s")
CLOSURES_PER_ROW = 16
ROW_BYTES = _ROW_HEADER.size + CLOSURES_PER_ROW * _CLOSURE.size


class PlanKind(enum.IntEnum):
    """What a rank does after it took the commands of a plan."""

    STEP = 1  # run the batch
    COMMANDS = 2  # nothing more: commands only, or a heartbeat
    STOP = 3  # leave the loop
    COUNT = 4  # add up over the ranks what the gates have counted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """Sizes that every rank computes from the same configuration."""

    max_num_tokens: int
    max_num_seqs: int
    max_num_blocks: int  # of one request
    num_command_bytes: int = 1 << 16

    @property
    def num_ints(self) -> int:
        """int32 values behind the header: input_ids, logits_indices, lengths, block tables."""
        return 2 * self.max_num_tokens + self.max_num_seqs * (2 + self.max_num_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of one plan."""
        return _HEADER.size + 4 * self.num_ints + self.num_command_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchArrays:
    """A step's batch before positions and slots are derived from it.

    Attributes:
        input_ids: [T] int32, tokens of all requests one after another.
        query_lens: [S] int32, tokens of each request in this step.
        seq_lens: [S] int32, context lengths including this step.
        block_tables: [S, B] int32, padded with block 0.
        logits_indices: [L] int32, ascending rows whose logits are wanted.
    """

    input_ids: Int32Array
    query_lens: Int32Array
    seq_lens: Int32Array
    block_tables: Int32Array
    logits_indices: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One message: whose, which, what to do, the batch of a STEP, and a piece of commands."""

    epoch: int
    step: int
    kind: PlanKind
    batch: BatchArrays | None = None
    commands: bytes = b""


def encode_plan(plan: StepPlan, shape: PlanShape) -> ByteArray:
    """Return the message, [shape.nbytes] uint8; AssertionError if something exceeds the shape."""
    message = np.zeros(shape.nbytes, dtype=np.uint8)
    parts, sizes = _batch_parts(plan.batch, shape)
    assert len(plan.commands) <= shape.num_command_bytes
    fields = (plan.epoch, plan.step, plan.kind, *sizes, len(plan.commands))
    _HEADER.pack_into(message.data, 0, *fields)
    ints = message[_HEADER.size : _HEADER.size + 4 * shape.num_ints].view(np.int32)
    start = 0
    for part, room in parts:
        ints[start : start + part.size] = part.reshape(-1)
        start += room
    area = _HEADER.size + 4 * shape.num_ints
    message[area : area + len(plan.commands)] = np.frombuffer(plan.commands, dtype=np.uint8)
    return message


def decode_plan(message: ByteArray, shape: PlanShape) -> StepPlan:
    """Return what `encode_plan` was given; the arrays are copies."""
    epoch, step, kind, num_tokens, num_seqs, num_blocks, num_logits, num_bytes = (
        _HEADER.unpack_from(message.data, 0)
    )
    ints = message[_HEADER.size : _HEADER.size + 4 * shape.num_ints].view(np.int32).copy()
    area = _HEADER.size + 4 * shape.num_ints
    batch = None
    if kind == PlanKind.STEP:
        tokens, seqs = shape.max_num_tokens, shape.max_num_seqs
        tables = 2 * tokens + 2 * seqs
        batch = BatchArrays(
            input_ids=ints[:num_tokens],
            logits_indices=ints[tokens : tokens + num_logits],
            query_lens=ints[2 * tokens : 2 * tokens + num_seqs],
            seq_lens=ints[2 * tokens + seqs : 2 * tokens + seqs + num_seqs],
            block_tables=ints[tables : tables + num_seqs * num_blocks].reshape(-1, num_blocks),
        )
    commands = message[area : area + num_bytes].tobytes()
    return StepPlan(epoch=epoch, step=step, kind=PlanKind(kind), batch=batch, commands=commands)


def _batch_parts(
    batch: BatchArrays | None, shape: PlanShape
) -> tuple[list[tuple[Int32Array, int]], tuple[int, int, int, int]]:
    """Return each array with its room in the message, and (T, S, B, L)."""
    if batch is None:
        return [], (0, 0, 0, 0)
    num_seqs, num_blocks = batch.block_tables.shape
    assert len(batch.query_lens) == len(batch.seq_lens) == num_seqs
    parts = [
        (batch.input_ids, shape.max_num_tokens),
        (batch.logits_indices, shape.max_num_tokens),
        (batch.query_lens, shape.max_num_seqs),
        (batch.seq_lens, shape.max_num_seqs),
        (batch.block_tables, shape.max_num_seqs * shape.max_num_blocks),
    ]
    assert all(part.size <= room for part, room in parts), "the batch exceeds the plan's shape"
    assert num_blocks <= shape.max_num_blocks
    return parts, (len(batch.input_ids), num_seqs, num_blocks, len(batch.logits_indices))


class ClosureOutcome(enum.IntEnum):
    """How a rank's part of a ticket ended."""

    SENT = 1
    ABANDONED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Closure:
    """One rank will never read the blocks of this ticket again.

    Attributes:
        nonce: of the ticket.
        outcome: how it ended.
        drained: whether every posted write is known to be complete; False only with FAILED.
        num_bytes: bytes that this rank wrote.
        num_descriptors: writes that it posted.
        transfer_s: seconds from its first post to its last completion.
        post_s: seconds that it spent in calls of the library's post.
        wire_s: seconds with at least one of its posts in flight.
        finished_at: monotonic seconds of the last completion (one clock per host).
        error_code: why it failed; None unless it did.
        error: the same in words; cut to 96 bytes on its way between ranks.
    """

    nonce: int
    outcome: ClosureOutcome
    drained: bool = True
    num_bytes: int = 0
    num_descriptors: int = 0
    transfer_s: float = 0.0
    post_s: float = 0.0
    wire_s: float = 0.0
    finished_at: float = 0.0
    error_code: ErrorCode | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """What a rank says to a plan, before anybody runs its batch.

    Attributes:
        closures: at most CLOSURES_PER_ROW.
        refuses: it cannot run the batch, so nobody does.
        word: how its experts stand in the step that follows, and its vote on where they move.
    """

    closures: Sequence[Closure] = ()
    refuses: bool = False
    word: Word = NO_WORD


def encode_row(epoch: int, step: int, answer: RankAnswer) -> ByteArray:
    """Return a rank's answer to plan `step`, [ROW_BYTES] uint8."""
    closures, word = answer.closures, answer.word
    assert len(closures) <= CLOSURES_PER_ROW
    row = np.zeros(ROW_BYTES, dtype=np.uint8)
    _ROW_HEADER.pack_into(
        row.data,
        0,
        epoch,
        step,
        len(closures),
        answer.refuses,
        word.vote,
        word.placement,
        word.turn,
    )
    for index, closure in enumerate(closures):
        text = closure.error.encode(errors="replace")[:96]
        _CLOSURE.pack_into(
            row.data,
            _ROW_HEADER.size + index * _CLOSURE.size,
            closure.nonce,
            closure.outcome,
            closure.drained,
            len(text),
            closure.error_code or 0,
            closure.num_bytes,
            closure.num_descriptors,
            closure.transfer_s,
            closure.post_s,
            closure.wire_s,
            closure.finished_at,
            text,
        )
    return row


def decode_row(row: ByteArray, epoch: int, step: int) -> RankAnswer:
    """Return what `encode_row` was given.

    Raises:
        InternalError: the row answers another plan: the ranks are out of step.
    """
    row_epoch, row_step, count, refuses, vote, placement, turn = _ROW_HEADER.unpack_from(
        row.data, 0
    )
    if (row_epoch, row_step) != (epoch, step):
        raise InternalError(
            f"a rank answers step {row_step} of epoch {row_epoch:x} in step {step} of {epoch:x}"
        )
    closures = [
        _decode_closure(row, _ROW_HEADER.size + index * _CLOSURE.size) for index in range(count)
    ]
    word = Word(placement, turn, Vote(vote))
    return RankAnswer(closures=closures, refuses=refuses, word=word)


def _decode_closure(row: ByteArray, offset: int) -> Closure:
    (
        nonce,
        outcome,
        drained,
        num_text,
        code,
        num_bytes,
        num_descriptors,
        transfer_s,
        post_s,
        wire_s,
        finished_at,
        text,
    ) = _CLOSURE.unpack_from(row.data, offset)
    return Closure(
        nonce=nonce,
        outcome=ClosureOutcome(outcome),
        drained=drained,
        num_bytes=num_bytes,
        num_descriptors=num_descriptors,
        transfer_s=transfer_s,
        post_s=post_s,
        wire_s=wire_s,
        finished_at=finished_at,
        error_code=ErrorCode(code) if code else None,
        error=text[:num_text].decode(errors="replace"),
    )
