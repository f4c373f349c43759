"""The inputs of a fixed-shape step of suffixes, as buffers on the device that never move.

Such a step looks the same for whatever sequences its tokens belong to, because attention is
absorbed and reads pages, segment by segment (`segments`). `load` copies a step in that was built as
any other (`engine.batch`), padded; `batch` gives what the graph of a size reads. Padding tokens run
token 0 at the first positions of the dummy block, and how many tokens are none is known to the
device, so that padding goes to no expert. Called on the thread that launches steps; nothing waits
for the device.
"""

from collections.abc import Sequence

import torch

from engine.attention.attention_rule import AttentionRule
from engine.batch import ForwardBatch
from engine.graphs.segments import SegmentShape, queries_of_a_segment
from engine.host_copy import upload
from engine.request import num_blocks_for


class SuffixInputs:
    """Buffers for up to T tokens of up to S sequences of up to B blocks; a `ChunkInputs`.

    Attributes:
        sizes: numbers of tokens, ascending; the last one is T.
        is_in_pieces: they are short.
    """

    is_in_pieces = False

    def __init__(
        self,
        rule: AttentionRule,
        sizes: Sequence[int],
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Allocate; `clear` or `load` fills them.

        Args:
            rule: of the model's attention.
            sizes: numbers of tokens, ascending.
            max_num_seqs: S.
            max_model_len: most tokens of a sequence.
            block_size: tokens of a block.
            device: where the buffers are.
        """
        self._rule, self._device, self.sizes = rule, device, tuple(sizes)
        self._max_model_len = max_model_len
        shape = SegmentShape(
            num_tokens=self.sizes[-1],
            num_seqs=max_num_seqs,
            num_queries=queries_of_a_segment(rule.heads),
        )
        self._shape = shape
        # Token id, position and slot of each token; each segment of padding begins at position 0.
        positions = torch.arange(shape.num_tokens, device=device) % shape.num_queries
        self._padding = torch.stack(
            (torch.zeros_like(positions), positions, positions % block_size)
        )
        self._tokens = self._padding.clone()
        # One more, of the dummy block alone.
        size = (shape.num_seqs + 1, num_blocks_for(max_model_len, block_size))
        self._tables = torch.zeros(size, dtype=torch.int32, device=device)
        size = (3, shape.num_segments + 1)
        self._segments = torch.zeros(size, dtype=torch.int32, device=device)
        self._num_tokens = torch.zeros(1, dtype=torch.int64, device=device)

    def takes(self, batch: ForwardBatch) -> bool:
        """See `ChunkInputs`: where all sequences attend in the absorbed form."""
        if batch.num_tokens > self.sizes[-1] or batch.num_seqs > self._shape.num_seqs:
            return False
        takes = self._rule.takes_absorbed
        return all(
            takes(queries, positions) and positions <= self._max_model_len
            for queries, positions in batch.lengths
        )

    def clear(self, size: int) -> None:
        """See `ChunkInputs`."""
        self._pad((), 0, size)

    def load(self, batch: ForwardBatch, size: int) -> None:
        """See `ChunkInputs`.

        What the tables hold beyond the columns that come stays: ids that were a block once, and
        that nobody follows, because no sequence is so long.
        """
        num_seqs, width = batch.block_tables.shape
        assert width <= self._tables.shape[1], "a sequence beyond max_model_len"
        tokens = torch.stack((batch.input_ids, batch.positions, batch.slot_mapping))
        self._tokens[:, : batch.num_tokens].copy_(tokens)
        self._tables[:num_seqs, :width].copy_(batch.block_tables)
        self._pad(batch.lengths, batch.num_tokens, size)

    def batch(self, size: int) -> ForwardBatch:
        """See `ChunkInputs`."""
        shape = self._of(size)
        count = shape.num_segments
        owners, starts, positions = self._segments[:, : count + 1]
        return ForwardBatch(
            input_ids=self._tokens[0, :size],
            positions=self._tokens[1, :size],
            slot_mapping=self._tokens[2, :size],
            cu_seqlens_q=starts,
            seq_lens=positions[:count],
            block_tables=self._tables.index_select(0, owners[:count]),
            logits_indices=self._tokens[0, :0],
            max_seqlen_q=shape.num_queries,
            num_rows=self._num_tokens,
        )

    def _pad(self, lengths: Sequence[tuple[int, int]], num_tokens: int, size: int) -> None:
        segments = self._of(size).cut(lengths)
        (on_device,) = upload([segments], self._device)
        self._segments[:, : segments.shape[1]].copy_(on_device)
        padding = self._padding[:, : size - num_tokens]
        self._tokens[:, num_tokens:size].copy_(padding)
        self._num_tokens.fill_(num_tokens)

    def _of(self, size: int) -> SegmentShape:
        shape = self._shape
        return SegmentShape(num_tokens=size, num_seqs=shape.num_seqs, num_queries=shape.num_queries)
