"""The inputs of a fixed-shape step of prompts, as buffers on the device that never move.

A prompt attends to its own tokens and to what is cached of it, and to nothing else. So the tokens
of a step, and a bound of the cached ones before them, bound all there is to gather and to expand,
however many prompts they are of. Padding is one more prompt, in the dummy block: its tokens run
token 0 at positions of that block, and how many tokens are none is known to the device, so that
padding goes to no expert. `load` copies a step in that was built as any other (`engine.batch`);
`batch` gives what the graph of a size reads. Called on the thread that launches steps; nothing
waits for the device.

Legend: T tokens with padding, P positions at most, S prompts at most, b blocks that hold them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        num_cached: most positions before the tokens of a step, of all prompts together.
        num_seqs: S.
        block_size: tokens of a block.
    """

    num_tokens: int
    num_cached: int
    num_seqs: int
    block_size: int

    @property
    def num_positions(self) -> int:
        """P."""
        return self.num_tokens + self.num_cached

    @property
    def num_blocks(self) -> int:
        """b: each prompt may end with a rest; the last one is the dummy block in every step."""
        rests = min(self.num_seqs, self.num_positions)
        return (self.num_positions - rests) // self.block_size + rests + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlaces:
    """Where the prompts of a step lie, on the host.

    Attributes:
        owners: [n] int64, the prompt of each block, in their order.
        columns: [n] int64, which of its blocks that is.
        kept: [P] int64, where each position lies in all b blocks.
        cu_seqlens: [2, S + 2] int32, running sums of tokens and of positions; padding is the prompt
            behind the others, and what is left of S has none.
    """

    owners: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    kept: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32]


def place_prompts(shape: PromptShape, lengths: Sequence[tuple[int, int]]) -> PromptPlaces:
    """Lay prompts of some lengths out behind one another. Pure.

    Args:
        shape: of the step, which has room for them.
        lengths: tokens in this step and positions of each prompt, at least 1.
    """
    counts = np.array(lengths, dtype=np.int64).reshape(len(lengths), 2)
    num_tokens, num_positions = (int(total) for total in counts.sum(axis=0))
    num_padding = shape.num_tokens - num_tokens
    assert num_padding >= 0
    assert num_positions - num_tokens <= shape.num_cached
    assert len(lengths) <= shape.num_seqs
    positions, block_size = counts[:, 1], shape.block_size
    blocks = -(-positions // block_size)
    owners = np.repeat(np.arange(len(lengths)), blocks)
    columns = np.arange(len(owners)) - (np.cumsum(blocks) - blocks)[owners]
    # A position lies as far behind its prompt's first block as behind its prompt's first position.
    shift = (np.cumsum(blocks) - blocks) * block_size - (np.cumsum(positions) - positions)
    own = np.arange(num_positions) + np.repeat(shift, positions)
    rest = np.arange(shape.num_positions - num_positions) % block_size
    cu_seqlens = np.zeros((2, shape.num_seqs + 2), dtype=np.int32)
    cu_seqlens[:, 1 : len(lengths) + 1] = counts.cumsum(axis=0).T
    cu_seqlens[0, len(lengths) + 1 :] = shape.num_tokens
    cu_seqlens[1, len(lengths) + 1 :] = num_positions + num_padding
    return PromptPlaces(
        owners=owners,
        columns=columns,
        kept=np.concatenate((own, rest + (shape.num_blocks - 1) * block_size)),
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
        max_num_cached: int,
        max_num_seqs: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Allocate; `clear` or `load` fills them.

        Args:
            rule: of the model's attention.
            sizes: numbers of tokens, ascending.
            max_num_cached: positions before them, of all prompts together.
            max_num_seqs: S.
            block_size: tokens of a block.
            device: where the buffers are.
        """
        self._rule, self._device, self.sizes = rule, device, tuple(sizes)
        self._shape = shape = PromptShape(
            num_tokens=self.sizes[-1],
            num_cached=max_num_cached,
            num_seqs=max_num_seqs,
            block_size=block_size,
        )
        # Token id, position and slot of each token.
        positions = torch.arange(shape.num_tokens, device=device) % block_size
        self._padding = torch.stack((torch.zeros_like(positions), positions, positions))
        self._tokens = self._padding.clone()
        self._block_ids = torch.zeros(shape.num_blocks, dtype=torch.int64, device=device)
        self._kept = torch.zeros(shape.num_positions, dtype=torch.int64, device=device)
        size = (2, max_num_seqs + 2)
        self._cu_seqlens = torch.zeros(size, dtype=torch.int32, device=device)
        self._num_tokens = torch.zeros(1, dtype=torch.int64, device=device)

    def takes(self, batch: ForwardBatch) -> bool:
        """See `ChunkInputs`: where none is absorbed, and few enough tokens are cached."""
        shape, takes_absorbed = self._shape, self._rule.takes_absorbed
        if batch.num_tokens > shape.num_tokens or batch.num_seqs > shape.num_seqs:
            return False
        num_cached = sum(positions - queries for queries, positions in batch.lengths)
        return num_cached <= shape.num_cached and not any(
            takes_absorbed(queries, positions) for queries, positions in batch.lengths
        )

    def clear(self, size: int) -> None:
        """See `ChunkInputs`."""
        self._block_ids.zero_()
        self._place(place_prompts(self._of(size), ()), 0, size)

    def load(self, batch: ForwardBatch, size: int) -> None:
        """See `ChunkInputs`."""
        tokens = torch.stack((batch.input_ids, batch.positions, batch.slot_mapping))
        self._tokens[:, : batch.num_tokens].copy_(tokens)
        places = place_prompts(self._of(size), batch.lengths)
        owners, columns = upload([places.owners, places.columns], self._device)
        self._block_ids.zero_()
        self._block_ids[: len(places.owners)].copy_(batch.block_tables[owners, columns])
        self._place(places, batch.num_tokens, size)

    def batch(self, size: int) -> ForwardBatch:
        """See `ChunkInputs`."""
        shape, (starts, starts_k) = self._of(size), self._cu_seqlens
        blocks = PromptBlocks(
            block_ids=self._block_ids[: shape.num_blocks],
            kept=self._kept[: shape.num_positions],
            cu_seqlens_k=starts_k,
        )
        return ForwardBatch(
            input_ids=self._tokens[0, :size],
            positions=self._tokens[1, :size],
            slot_mapping=self._tokens[2, :size],
            cu_seqlens_q=starts,
            seq_lens=starts_k.diff(),
            block_tables=starts.new_zeros((shape.num_seqs + 1, 0)),
            logits_indices=self._tokens[0, :0],
            max_seqlen_q=size,
            num_rows=self._num_tokens,
            prompts=blocks,
        )

    def _place(self, places: PromptPlaces, num_tokens: int, size: int) -> None:
        kept, cu_seqlens = upload([places.kept, places.cu_seqlens], self._device)
        self._kept[: kept.shape[0]].copy_(kept)
        self._cu_seqlens.copy_(cu_seqlens)
        self._tokens[:, num_tokens:size].copy_(self._padding[:, : size - num_tokens])
        self._num_tokens.fill_(num_tokens)

    def _of(self, size: int) -> PromptShape:
        return replace(self._shape, num_tokens=size)
