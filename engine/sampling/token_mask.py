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

MASKED: Final = -1e30
"""No bias, penalty or noise lifts it to what a model says."""
ROWS_AT_A_TIME: Final = 64
"""Unpacked bits take a byte a token: 8 MB for so many rows of 129,280 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask:
    """Which tokens may be chosen in some rows of a step, on the host.

    Attributes:
        rows: [C] int64, ascending; the others may have any token.
        words: [C, W] int32, token t is bit t % 32 of word t // 32; W words of 32 tokens hold the
            vocabulary, and bits beyond it mean nothing. Pinned where a GPU is to have them, and not
            to be changed afterwards.
    """

    rows: npt.NDArray[np.int64]
    words: Tensor


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
