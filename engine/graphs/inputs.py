"""The inputs of a fixed-shape decode step: as arrays on the host, and as buffers on the device.

`DecodeInputs` is what one step runs, without padding. `StaticInputs` is memory that never moves,
large enough for the largest batch: a step's inputs are copied in, and the first rows of every
buffer are what the graph of a batch size reads. Positions, KV slots and the rest are computed from
these on the device. Padding rows run token 0 at position 0 of the dummy block, and how many rows
are none is known to the device too, so that padding goes to no expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import ForwardBatch
from engine.graphs.draft_rows import DraftedSequences
from engine.host_copy import upload
from engine.sampling.graph_sampler import SamplingRows, SamplingStage
from engine.sampling.token_mask import NO_DRAFT

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class IntColumn(IntEnum):
    """Rows of the integer array: what each sequence runs and how it is sampled."""

    TOKEN_ID = 0
    SOURCE = 1  # place of the token among those of the step before, -1 if TOKEN_ID is it
    SEQ_LEN = 2
    SLOT = 3
    OUTPUT_INDEX = 4
    MIXED_SEED = 5
    TOP_K = 6
    CAPACITY = 7  # positions whose KV has a place; of steps with drafts, as the next one
    DRAFT = 8  # what is taken for the next token: an id, -1 for nobody knows, KEPT_DRAFTS


KEPT_DRAFTS: Final = -2
"""The drafts are those that the step before has left on the device, by slot."""


class FloatColumn(IntEnum):
    """Rows of the float array; see `SamplingRows`."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    FREQUENCY = 4
    PRESENCE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """One decode step of S sequences with one token each.

    Attributes:
        integers: [len(IntColumn), S] int64.
        floats: [len(FloatColumn), S] float32.
        block_tables: [S, B] int32, padded with block 0.
        unread_ids: [P] int64 on the device, tokens of the step before; None if no SOURCE is set.
        unread_counts: [P] int64 on the device, how many tokens each of its requests got, of which
            OUTPUT_INDEX and SEQ_LEN count one; None if that is all.
        stage: how much sampling the sequences need.
        num_logprobs: per sequence as in `SamplingParams`.
    """

    integers: Int64Array
    floats: Float32Array
    block_tables: Int32Array
    unread_ids: Tensor | None
    unread_counts: Tensor | None = None
    stage: SamplingStage
    num_logprobs: Sequence[int]

    @property
    def num_seqs(self) -> int:
        """S."""
        return int(self.integers.shape[1])


class StaticInputs:
    """Buffers for up to `max_num_seqs` sequences of up to `max_num_blocks` blocks.

    Attributes:
        num_loads: how often a step's inputs were copied in; tells one step from the next.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_blocks: int,
        *,
        block_size: int,
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        """Allocate, and fill with padding."""
        self.max_num_seqs = max_num_seqs
        self.max_num_blocks = max_num_blocks
        self._block_size = block_size
        self._device = torch.device(device)
        self._padding = padding_columns(max_num_seqs, vocab_size)
        integers, floats = self._padding
        self._integers = torch.from_numpy(integers).to(device, copy=True)
        self._floats = torch.from_numpy(floats).to(device, copy=True)
        self._tables = torch.zeros(max_num_seqs, max_num_blocks, dtype=torch.int32, device=device)
        self._unread = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._unread_counts = torch.ones(max_num_seqs, dtype=torch.int64, device=device)
        self._has_counts = False
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._num_seqs = torch.zeros(1, dtype=torch.int64, device=device)
        self.num_loads = self._num_loaded = 0

    def load(self, inputs: DecodeInputs, bucket: int) -> None:
        """Copy a step's inputs in, padded to `bucket` rows; the host does not wait.

        What the tables hold beyond the columns that come stays: ids that were a block once, and
        that nobody follows, because no sequence is so long.
        """
        self.num_loads += 1
        self._num_loaded = inputs.num_seqs
        num_seqs, width = inputs.block_tables.shape
        assert num_seqs <= bucket <= self.max_num_seqs
        assert width <= self.max_num_blocks, "a sequence beyond max_model_len"
        integers, floats = (array[:, :bucket].copy() for array in self._padding)
        integers[:, :num_seqs], floats[:, :num_seqs] = inputs.integers, inputs.floats
        tables = np.zeros((bucket, max(width, 1)), dtype=np.int32)
        tables[:num_seqs, :width] = inputs.block_tables
        on_device = upload([integers, floats, tables], self._device)
        self._integers[:, :bucket].copy_(on_device[0])
        self._floats[:, :bucket].copy_(on_device[1])
        self._tables[:bucket, : tables.shape[1]].copy_(on_device[2])
        self._num_seqs.fill_(num_seqs)
        if inputs.unread_ids is not None:
            self._unread[: len(inputs.unread_ids)].copy_(inputs.unread_ids)
        if inputs.unread_counts is not None:
            self._unread_counts[: len(inputs.unread_counts)].copy_(inputs.unread_counts)
            self._has_counts = True
        elif self._has_counts:
            self._unread_counts.fill_(1)
            self._has_counts = False

    def batch(self, bucket: int) -> ForwardBatch:
        """Return the tensors of a step of `bucket` sequences; reads nothing on the host."""
        tables = self._tables[:bucket]
        seq_lens = self._column(IntColumn.SEQ_LEN, bucket)
        positions = seq_lens - 1
        blocks = tables.gather(
            1, torch.div(positions, self._block_size, rounding_mode="floor")[:, None]
        )
        return ForwardBatch(
            input_ids=self._token_ids(bucket),
            positions=positions,
            slot_mapping=blocks[:, 0].long() * self._block_size + positions % self._block_size,
            cu_seqlens_q=self._starts[: bucket + 1],
            seq_lens=seq_lens.int(),
            block_tables=tables,
            logits_indices=self._starts[:bucket].long(),
            max_seqlen_q=1,
            num_rows=self._num_used(bucket),
        )

    def drafted(self, bucket: int, kept_SK: Tensor) -> DraftedSequences:
        """Return `bucket` sequences of a step with drafts; reads nothing on the host.

        Args:
            bucket: B.
            kept_SK: [S, K] int64, drafts by slot; K may be 0.
        """
        num_ahead = self._num_ahead(bucket)
        kept = kept_SK.index_select(0, self._column(IntColumn.SLOT, bucket))
        first = self._column(IntColumn.DRAFT, bucket)[:, None]
        given = F.pad(first, (0, kept.shape[1] - 1), value=NO_DRAFT)
        return DraftedSequences(
            token_ids_B=self._token_ids(bucket),
            positions_B=self._column(IntColumn.SEQ_LEN, bucket) - 1 + num_ahead,
            drafts_BK=torch.where(first == KEPT_DRAFTS, kept, given),
            num_ahead_B=num_ahead,
            capacity_B=self._column(IntColumn.CAPACITY, bucket),
            block_tables_BW=self._tables[:bucket],
            num_seqs=self._num_used(bucket),
            block_size=self._block_size,
        )

    def _num_ahead(self, bucket: int) -> Tensor:
        """Return [B] int64; see `DraftedSequences`."""
        source = self._column(IntColumn.SOURCE, bucket)
        counts = self._unread_counts.index_select(0, source.clamp_min(0))
        return (counts - 1).masked_fill(source < 0, 0)

    def sampling_rows(
        self, bucket: int, *, num_rows: int = 1, ahead: Tensor | None = None
    ) -> SamplingRows:
        """Return what the sampler is told of a step of `bucket` sequences of equally many rows.

        Args:
            bucket: B.
            num_rows: R, of each sequence; those of a sequence come one after another.
            ahead: [B * R] int64, how many outputs each row is further on than the host knows of its
                sequence; None for no row.
        """
        integers_B, floats_B = self._integers[:, :bucket], self._floats[:, :bucket]
        if num_rows > 1:
            integers_B = integers_B.repeat_interleave(num_rows, dim=1)
            floats_B = floats_B.repeat_interleave(num_rows, dim=1)
        integers, floats = integers_B.unbind(), floats_B.unbind()
        output_index = integers[IntColumn.OUTPUT_INDEX]
        return SamplingRows(
            slot=integers[IntColumn.SLOT],
            output_index=output_index if ahead is None else output_index + ahead,
            mixed_seed=integers[IntColumn.MIXED_SEED],
            top_k=integers[IntColumn.TOP_K],
            temperature=floats[FloatColumn.TEMPERATURE],
            top_p=floats[FloatColumn.TOP_P],
            min_p=floats[FloatColumn.MIN_P],
            repetition=floats[FloatColumn.REPETITION],
            frequency=floats[FloatColumn.FREQUENCY],
            presence=floats[FloatColumn.PRESENCE],
        )

    def _num_used(self, bucket: int) -> Tensor | None:
        """Return how many of `bucket` sequences are somebody's, [1] int64; None for all.

        What is captured holds for steps that are padded too. On a CPU it is called, after each
        load.
        """
        is_whole = self._device.type == "cpu" and self._num_loaded == bucket
        return None if is_whole else self._num_seqs

    def slots(self, bucket: int) -> Tensor:
        """Return the sampler's slots of `bucket` sequences, [B] int64."""
        return self._column(IntColumn.SLOT, bucket)

    def _token_ids(self, bucket: int) -> Tensor:
        """Return the last token of each sequence, [B] int64."""
        source = self._column(IntColumn.SOURCE, bucket)
        return torch.where(
            source < 0,
            self._column(IntColumn.TOKEN_ID, bucket),
            self._unread.index_select(0, source.clamp_min(0)),
        )

    def _column(self, column: IntColumn, bucket: int) -> Tensor:
        return self._integers[column, :bucket]


def padding_columns(num_rows: int, vocab_size: int) -> tuple[Int64Array, Float32Array]:
    """Return the arrays of `num_rows` padding rows: greedy, and in the slot after the last."""
    integers = np.zeros((len(IntColumn), num_rows), dtype=np.int64)
    integers[IntColumn.SOURCE] = -1
    integers[IntColumn.SEQ_LEN] = 1
    integers[IntColumn.SLOT] = num_rows
    integers[IntColumn.TOP_K] = vocab_size
    integers[IntColumn.DRAFT] = NO_DRAFT
    floats = np.zeros((len(FloatColumn), num_rows), dtype=np.float32)
    floats[FloatColumn.TOP_P] = 1.0
    floats[FloatColumn.REPETITION] = 1.0
    return integers, floats
