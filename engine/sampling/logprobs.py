"""Log-probabilities of the raw distribution, for outputs and for prompts.

"Raw" is the model's own softmax: before bias, penalties, temperature and truncation. Values are
natural logarithms.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.host_copy import HostCopies, upload
from runtime.sampling import PositionLogprobs


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities of R rows on their way to the host.

    Attributes:
        chosen: [R] float32.
        best_ids: [R, W] int64.
        best: [R, W] float32, falling.
        num_top: R counts of best tokens wanted.
        ranks: [R] int64; None where nobody asked.
    """

    chosen: torch.Tensor
    best_ids: torch.Tensor
    best: torch.Tensor
    num_top: Sequence[int]
    ranks: torch.Tensor | None = None

    def collect(self) -> list[PositionLogprobs]:
        """Return one entry per row, once the copies are here."""
        rows = zip(
            self.chosen.tolist(),
            self.best_ids.tolist(),
            self.best.tolist(),
            self.num_top,
            [0] * len(self.num_top) if self.ranks is None else self.ranks.tolist(),
            strict=True,
        )
        return [
            PositionLogprobs(logprob, tuple(ids[:count]), tuple(values[:count]), rank)
            for logprob, ids, values, count, rank in rows
        ]


def launch_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: Sequence[int],
    copies: HostCopies,
    *,
    with_ranks: bool = False,
) -> PendingLogprobs:
    """Compute the log-probability of one token per row, and of the best tokens of the row.

    Args:
        logits: [R, V] float32, R > 0.
        token_ids: [R] int64 on the same device, tokens that stand (or come next) at the positions.
        num_top: R counts of best tokens wanted; 0 for none, more than V gives V.
        copies: take the results to the host.
        with_ranks: count, too, how many tokens are at least as likely as the one of the row.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])[:, 0]
    best = logprobs.topk(min(max(num_top), logits.shape[1]), dim=-1)
    ranks = copies.add((logprobs >= chosen[:, None]).sum(dim=-1)) if with_ranks else None
    return PendingLogprobs(
        copies.add(chosen), copies.add(best.indices), copies.add(best.values), num_top, ranks
    )


def launch_prompt_logprobs(
    logits: torch.Tensor, next_ids: Sequence[int], num_top: int, copies: HostCopies
) -> PendingLogprobs:
    """Compute the log-probabilities of prompt tokens from the positions before them.

    Args:
        logits: [R, V] float32 at R successive positions, R > 0.
        next_ids: the R prompt tokens one position later.
        num_top: how many best tokens to list at each position.
        copies: take the results to the host.
    """
    (token_ids,) = upload([np.array(next_ids, dtype=np.int64)], logits.device)
    tops = [num_top] * len(next_ids)
    return launch_logprobs(logits, token_ids, tops, copies, with_ranks=True)
