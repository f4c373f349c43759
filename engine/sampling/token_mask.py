"""Making tokens impossible that a constraint rules out, row by row, before anything else is done.

A masked logit becomes a number below all others, not minus infinity, so that what follows (biases,
penalties, differences to the best, order statistics) meets numbers only. The noise of a token
depends on its id, so the tokens that are left are drawn as if the others were merely unlikely.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.host_copy import upload

NO_DRAFT: Final = -1
"""In place of a token id that is guessed."""
MASKED: Final = -1e30
"""No bias, penalty or noise lifts it to what a model says."""
ROWS_AT_A_TIME: Final = 64
"""Unpacked bits take a byte a token: 8 MB for so many rows of 129,280 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask:
    """Which tokens may be chosen in some rows of a step, on the host.

    Attributes:
        rows: [C] int64, each once; the others may have any token.
        words: [C, W] int32, token t is bit t % 32 of word t // 32; W words of 32 tokens hold the
            vocabulary, and bits beyond it mean nothing. Pinned where a GPU is to have them, and not
            to be changed afterwards.
        drafts: what the rows behind a draft are masked for; None in a step without drafts.
    """

    rows: npt.NDArray[np.int64]
    words: Tensor
    drafts: "MaskedDrafts | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedDrafts:
    """The drafts of sequences with a constraint, as far as one token may come behind another.

    A row behind any other draft has the mask of another text, or none.

    Attributes:
        seqs: [C] int64, places of the sequences in the step.
        token_ids: [C, K] int64; `NO_DRAFT` from the first on that is not to be verified.
    """

    seqs: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]

    def leave(self, drafts_BK: Tensor) -> Tensor:
        """Return the drafts of a step, and `NO_DRAFT` for those that rows are not masked for."""
        seqs, told_CK = upload([self.seqs, self.token_ids], drafts_BK.device)
        own_CK = drafts_BK.index_select(0, seqs)
        return drafts_BK.index_copy(0, seqs, own_CK.masked_fill(own_CK != told_CK, NO_DRAFT))


def mask_tokens(logits: Tensor, mask: TokenMask) -> None:
    """Make the tokens of cleared bits impossible, in place; the host does not wait.

    Args:
        logits: [L, V] float32.
        mask: of rows below L, and as wide as V.
    """
    bits_of_byte = 1 << np.arange(8, dtype=np.uint8)
    rows, bits = upload([mask.rows, bits_of_byte.astype(np.uint8)], logits.device)
    packed = mask.words.to(logits.device, non_blocking=True).view(torch.uint8)
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        index = rows[start : start + ROWS_AT_A_TIME]
        # [c, 4W, 8] to [c, 32W]: bytes of a word come lowest first.
        is_cleared = (packed[start : start + ROWS_AT_A_TIME, :, None] & bits) == 0
        is_ruled_out = is_cleared.flatten(1)[:, : logits.shape[1]]
        logits.index_copy_(
            0, index, logits.index_select(0, index).masked_fill(is_ruled_out, MASKED)
        )
