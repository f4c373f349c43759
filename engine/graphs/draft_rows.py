"""The rows of a step that verifies drafts, made on the device of what is known of each sequence.

A sequence brings R = K + 1 rows: its last token, whose KV is not written yet, and K drafts. The key
idea: to attention every row is a sequence of its own, with one query, over the same blocks as its
neighbours and one position longer than the row before it. All rows have stored their KV before any
of them attends, so a row sees those before it: causal attention of R queries, by what single
queries have anyway, in each of its forms.

A draft may lie beyond the memory of its sequence, or there may be none. Its row, and those behind
it, then run token 0 at position 0, and what they write goes into the dummy block. So does the last
token of a sequence that is over, which the host does not know yet: it stands beyond, too.

Legend: B sequences, W blocks of a table.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.sampling.token_mask import NO_DRAFT


@dataclass(frozen=True, kw_only=True)
class DraftedSequences:
    """What is known of the sequences of a step, all on the device; the rest is made of it once.

    Attributes:
        token_ids_B: int64, the last token of each.
        positions_B: int64, where it stands.
        drafts_BK: int64, what is taken for the tokens behind it; `NO_DRAFT` for none.
        num_ahead_B: int64, tokens that the step before gave and the host did not count; positions
            are behind them.
        capacity_B: int64, positions whose KV has a place, and is wanted.
        block_tables_BW: int32.
        num_seqs: [1] int64, how many of the sequences, the first ones, are somebody's; None for
            all.
        block_size: tokens per block.
    """

    token_ids_B: Tensor
    positions_B: Tensor
    drafts_BK: Tensor
    num_ahead_B: Tensor
    capacity_B: Tensor
    block_tables_BW: Tensor
    num_seqs: Tensor | None
    block_size: int

    @cached_property
    def usable_drafts(self) -> Tensor:
        """The drafts that can be verified, and `NO_DRAFT` for the others, [B, K] int64."""
        drafts = self.drafts_BK
        behind = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
        has_place = self.positions_B[:, None] + behind < self.capacity_B[:, None]
        is_usable = ((drafts >= 0) & has_place).cumprod(dim=1).bool()
        return torch.where(is_usable, drafts, NO_DRAFT)

    @cached_property
    def verifying(self) -> ForwardBatch:
        """The B * R rows that verify, those of a sequence one after another."""
        drafts = self.usable_drafts
        num_rows = drafts.shape[1] + 1
        ids = torch.cat((self.token_ids_B[:, None], drafts.clamp_min(0)), dim=1)
        behind = torch.arange(num_rows, device=drafts.device)
        is_within = self.positions_B < self.capacity_B
        is_real = torch.cat((is_within[:, None], drafts >= 0), dim=1)
        return self._rows(ids, self.positions_B[:, None] + behind, is_real)

    def drafting(self, token_ids_B: Tensor, positions_B: Tensor) -> ForwardBatch:
        """Return one row a sequence, at these positions [B], for a further draft."""
        has_place = positions_B < self.capacity_B
        return self._rows(token_ids_B[:, None], positions_B[:, None], has_place[:, None])

    def _rows(self, ids_BR: Tensor, positions_BR: Tensor, is_real_BR: Tensor) -> ForwardBatch:
        num_seqs, num_rows = ids_BR.shape
        size, tables = self.block_size, self.block_tables_BW
        positions = positions_BR * is_real_BR
        blocks = tables.gather(1, torch.div(positions, size, rounding_mode="floor")).long()
        slots = (blocks * size + positions % size) * is_real_BR
        starts = torch.arange(num_seqs * num_rows + 1, device=ids_BR.device)
        return ForwardBatch(
            input_ids=ids_BR.flatten(),
            positions=positions.flatten(),
            slot_mapping=slots.flatten(),
            cu_seqlens_q=starts.int(),
            seq_lens=(positions + 1).flatten().int(),
            block_tables=tables[:, None].expand(-1, num_rows, -1).flatten(0, 1),
            logits_indices=starts[:-1],
            max_seqlen_q=1,
            num_rows=None if self.num_seqs is None else self.num_seqs * num_rows,
        )
