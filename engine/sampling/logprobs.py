"""Log-probabilities of the raw distribution, for outputs and for prompts.

"Raw" is the model's own softmax: before bias, penalties, temperature and truncation. Values are
natural logarithms.
"""

from collections.abc import Sequence

import torch

from runtime.sampling import PositionLogprobs


def position_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[PositionLogprobs]:
    """Return the log-probability of one token per row, and of the best tokens of the row.

    Args:
        logits: [R, V] float32.
        token_ids: R tokens that stand (or come next) at the positions.
        num_top: R counts of best tokens wanted; 0 for none, more than V gives V.
    """
    if not token_ids:
        return []
    logprobs = logits.log_softmax(dim=-1)
    index = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    chosen = logprobs.gather(-1, index[:, None])[:, 0].tolist()
    width = min(max(num_top), logits.shape[1])
    best = logprobs.topk(width, dim=-1)
    rows = zip(chosen, best.indices.tolist(), best.values.tolist(), num_top, strict=True)
    return [
        PositionLogprobs(logprob, tuple(ids[:count]), tuple(values[:count]))
        for logprob, ids, values, count in rows
    ]


def prompt_logprobs(
    logits: torch.Tensor, next_ids: Sequence[int], num_top: int
) -> list[PositionLogprobs]:
    """Return the log-probabilities of prompt tokens from the logits of the positions before them.

    Args:
        logits: [R, V] float32 at R successive positions.
        next_ids: the R prompt tokens one position later.
        num_top: how many best tokens to list at each position.
    """
    return position_logprobs(logits, next_ids, [num_top] * len(next_ids))
