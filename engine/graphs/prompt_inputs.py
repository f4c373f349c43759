"""The inputs of a fixed-shape step of whole prompts, as buffers on the device that never move.

A prompt without a cached prefix attends to its own tokens and to nothing else, so the tokens of a
step bound all there is to gather and to expand, however many prompts they are of. Padding is one
more prompt, in the dummy block: its tokens run token 0 at positions of that block, and how many
tokens are none is known to the device, so that padding goes to no expert. `load` copies a step in
that was built as any other (`engine.batch`); `batch` gives what the graph of a size reads. Called
on the thread that launches steps; nothing waits for the device.

Legend: T tokens with padding, S prompts at most, b blocks that hold them at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.attention_rule import AttentionRule
from engine.batch import ForwardBatch, PromptBlocks
from engine.host_copy import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShape:
    """What is fixed.

    Attributes:
        num_tokens: T.
        num_seqs: S.
        block_size: tokens of a block.
    """

    num_tokens: int
    num_seqs: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        """b: each prompt may end with a rest; the last one is the dummy block in every step."""
        rests = min(self.num_seqs, self.num_tokens)
        return (self.num_tokens - rests) // self.block_size + rests + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlaces:
    """Where the prompts of a step lie, on the host.

    Attributes:
        owners: [n] int64, the prompt of each block, in their order.
        columns: [n] int64, which of its blocks that is.
        kept: [T] int64, where each token lies in all b blocks.
        cu_seqlens: [S + 2] int32, running sum of tokens; padding is the prompt behind the others,
            and what is left of S has none.
    """

    owners: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    kept: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32]


def place_prompts(shape: PromptShape, num_tokens: Sequence[int]) -> PromptPlaces:
    """Lay prompts of some numbers of tokens out behind one another. Pure.

    Args:
        shape: of the step, which has room for them.
        num_tokens: of each prompt, at least 1.
    """
    counts = np.array(num_tokens, dtype=np.int64)
    total, block_size = int(counts.sum()), shape.block_size
    assert total <= shape.num_tokens
    assert len(counts) <= shape.num_seqs
    blocks = -(-counts // block_size)
    owners = np.repeat(np.arange(len(counts)), blocks)
    columns = np.arange(len(owners)) - (np.cumsum(blocks) - blocks)[owners]
    # A token of a prompt lies as far behind its first block's begin as behind its first token.
    shift = (np.cumsum(blocks) - blocks) * block_size - (np.cumsum(counts) - counts)
    own = np.arange(total) + np.repeat(shift, counts)
    padding = np.arange(shape.num_tokens - total) % block_size
    cu_seqlens = np.full(shape.num_seqs + 2, shape.num_tokens, dtype=np.int32)
    cu_seqlens[0] = 0
    cu_seqlens[1 : len(counts) + 1] = np.cumsum(counts)
    return PromptPlaces(
        owners=owners,
        columns=columns,
        kept=np.concatenate((own, padding + (shape.num_blocks - 1) * block_size)),
        cu_seqlens=cu_seqlens,
    )


class PromptInputs:
    """Buffers for up to T tokens of up to S prompts; a `ChunkInputs`.

    Attributes:
        sizes: numbers of tokens, ascending; the last one is T.
        is_in_pieces: they may be long.
    """

    is_in_pieces = True

    def __init__(
        self,
        rule: AttentionRule,
        sizes: Sequence[int],
        *,
        max_num_seqs: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Allocate; `clear` or `load` fills them.

        Args:
            rule: of the model's attention.
            sizes: numbers of tokens, ascending.
            max_num_seqs: S.
            block_size: tokens of a block.
            device: where the buffers are.
        """
        self._rule, self._device, self.sizes = rule, device, tuple(sizes)
        self._max_num_seqs, self._block_size = max_num_seqs, block_size
        num_tokens, num_blocks = self.sizes[-1], self._of(self.sizes[-1]).num_blocks
        # Token id, position and slot of each token.
        positions = torch.arange(num_tokens, device=device) % block_size
        self._padding = torch.stack((torch.zeros_like(positions), positions, positions))
        self._tokens = self._padding.clone()
        self._block_ids = torch.zeros(num_blocks, dtype=torch.int64, device=device)
        self._kept = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._cu_seqlens = torch.zeros(max_num_seqs + 2, dtype=torch.int32, device=device)
        self._num_tokens = torch.zeros(1, dtype=torch.int64, device=device)

    def takes(self, batch: ForwardBatch) -> bool:
        """See `ChunkInputs`: where no sequence has a cached prefix, and keys are expanded."""
        if batch.num_tokens > self.sizes[-1] or batch.num_seqs > self._max_num_seqs:
            return False
        takes_absorbed = self._rule.takes_absorbed
        return all(
            queries == positions and not takes_absorbed(queries, positions)
            for queries, positions in batch.lengths
        )

    def clear(self, size: int) -> None:
        """See `ChunkInputs`."""
        self._block_ids.zero_()
        self._place(place_prompts(self._of(size), ()), 0, size)

    def load(self, batch: ForwardBatch, size: int) -> None:
        """See `ChunkInputs`."""
        tokens = torch.stack((batch.input_ids, batch.positions, batch.slot_mapping))
        self._tokens[:, : batch.num_tokens].copy_(tokens)
        places = place_prompts(self._of(size), [queries for queries, _ in batch.lengths])
        owners, columns = upload([places.owners, places.columns], self._device)
        self._block_ids.zero_()
        self._block_ids[: len(places.owners)].copy_(batch.block_tables[owners, columns])
        self._place(places, batch.num_tokens, size)

    def batch(self, size: int) -> ForwardBatch:
        """See `ChunkInputs`."""
        blocks = PromptBlocks(
            block_ids=self._block_ids[: self._of(size).num_blocks], kept=self._kept[:size]
        )
        return ForwardBatch(
            input_ids=self._tokens[0, :size],
            positions=self._tokens[1, :size],
            slot_mapping=self._tokens[2, :size],
            cu_seqlens_q=self._cu_seqlens,
            seq_lens=self._cu_seqlens.diff(),
            block_tables=self._cu_seqlens.new_zeros((self._max_num_seqs + 1, 0)),
            logits_indices=self._tokens[0, :0],
            max_seqlen_q=size,
            num_rows=self._num_tokens,
            prompts=blocks,
        )

    def _place(self, places: PromptPlaces, num_tokens: int, size: int) -> None:
        kept, cu_seqlens = upload([places.kept, places.cu_seqlens], self._device)
        self._kept[:size].copy_(kept)
        self._cu_seqlens.copy_(cu_seqlens)
        self._tokens[:, num_tokens:size].copy_(self._padding[:, : size - num_tokens])
        self._num_tokens.fill_(num_tokens)

    def _of(self, size: int) -> PromptShape:
        return PromptShape(
            num_tokens=size, num_seqs=self._max_num_seqs, block_size=self._block_size
        )
