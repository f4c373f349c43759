"""The inputs of a fixed-shape step of suffixes, as buffers on the device that never move.

`load` copies a step in that was built as any other (`engine.batch`), padded; `batch` gives what the
graph of a size reads. Padding tokens run token 0 at the first positions of the dummy block, and how
many tokens are none is known to the device, so that padding goes to no expert. Called on the thread
that launches steps; nothing waits for the device.
"""

from collections.abc import Sequence

import torch

from engine.batch import ForwardBatch
from engine.graphs.segments import SegmentShape
from engine.host_copy import upload


class SuffixInputs:
    """Buffers for up to T tokens of up to S sequences of up to B blocks."""

    def __init__(
        self, shape: SegmentShape, max_num_blocks: int, *, block_size: int, device: torch.device
    ) -> None:
        """Allocate; `clear` or `load` fills them.

        Args:
            shape: of the largest step.
            max_num_blocks: B.
            block_size: tokens of a block.
            device: where the buffers are.
        """
        self._shape, self._device = shape, device
        # Token id, position and slot of each token; each segment of padding begins at position 0.
        positions = torch.arange(shape.num_tokens, device=device) % shape.num_queries
        self._padding = torch.stack(
            (torch.zeros_like(positions), positions, positions % block_size)
        )
        self._tokens = self._padding.clone()
        # One more, of the dummy block alone.
        size = (shape.num_seqs + 1, max_num_blocks)
        self._tables = torch.zeros(size, dtype=torch.int32, device=device)
        size = (3, shape.num_segments + 1)
        self._segments = torch.zeros(size, dtype=torch.int32, device=device)
        self._num_tokens = torch.zeros(1, dtype=torch.int64, device=device)

    def clear(self, bucket: int) -> None:
        """Let a step of `bucket` tokens be padding only."""
        self._pad((), 0, bucket)

    def load(self, batch: ForwardBatch, bucket: int) -> None:
        """Copy a step in, padded to `bucket` tokens.

        What the tables hold beyond the columns that come stays: ids that were a block once, and
        that nobody follows, because no sequence is so long.
        """
        num_seqs, width = batch.block_tables.shape
        assert width <= self._tables.shape[1], "a sequence beyond max_model_len"
        tokens = torch.stack((batch.input_ids, batch.positions, batch.slot_mapping))
        self._tokens[:, : batch.num_tokens].copy_(tokens)
        self._tables[:num_seqs, :width].copy_(batch.block_tables)
        self._pad(batch.lengths, batch.num_tokens, bucket)

    def batch(self, bucket: int) -> ForwardBatch:
        """Return the tensors of a step of `bucket` tokens; reads nothing on the host."""
        shape = self._of(bucket)
        count = shape.num_segments
        owners, starts, positions = self._segments[:, : count + 1]
        return ForwardBatch(
            input_ids=self._tokens[0, :bucket],
            positions=self._tokens[1, :bucket],
            slot_mapping=self._tokens[2, :bucket],
            cu_seqlens_q=starts,
            seq_lens=positions[:count],
            block_tables=self._tables.index_select(0, owners[:count]),
            logits_indices=self._tokens[0, :0],
            max_seqlen_q=shape.num_queries,
            num_rows=self._num_tokens,
        )

    def _pad(self, lengths: Sequence[tuple[int, int]], num_tokens: int, bucket: int) -> None:
        segments = self._of(bucket).cut(lengths)
        (on_device,) = upload([segments], self._device)
        self._segments[:, : segments.shape[1]].copy_(on_device)
        padding = self._padding[:, : bucket - num_tokens]
        self._tokens[:, num_tokens:bucket].copy_(padding)
        self._num_tokens.fill_(num_tokens)

    def _of(self, bucket: int) -> SegmentShape:
        shape = self._shape
        return SegmentShape(
            num_tokens=bucket, num_seqs=shape.num_seqs, num_queries=shape.num_queries
        )
