"""Adjustments that can change which token is most likely: bias, minimum length, penalties.

Each function changes `logits` [L, V] float32 in place, for all rows that use it at once, and does
nothing if none does. Formulas: a biased logit is l + b; repetition r divides positive and
multiplies negative logits of tokens seen in prompt or output (Keskar et al., 2019, CTRL); presence
and frequency subtract p * [count > 0] and f * count, where count is over the output.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from engine.sampling.inputs import SamplingInput


def needs_adjustment(item: SamplingInput) -> bool:
    """Whether any function of this module would change the row of `item`."""
    return bool(item.params.logit_bias) or _is_too_short(item) or _is_penalised(item)


def apply_adjustments(logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> None:
    """Apply bias, minimum length and penalties in this order, in place."""
    apply_logit_bias(logits, inputs)
    mask_stop_tokens(logits, inputs)
    apply_penalties(logits, inputs)


def apply_logit_bias(logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> None:
    """Add each row's `logit_bias`, in place."""
    entries = [
        (row, token_id, bias)
        for row, item in enumerate(inputs)
        for token_id, bias in item.params.logit_bias.items()
    ]
    if entries:
        rows, token_ids, biases = zip(*entries, strict=True)
        index = _index(logits, rows, token_ids)
        logits[index] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)


def mask_stop_tokens(logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> None:
    """Make stop tokens impossible where the output is shorter than `min_tokens`, in place."""
    entries = [
        (row, token_id)
        for row, item in enumerate(inputs)
        if _is_too_short(item)
        for token_id in item.params.stop_token_ids
        if token_id < logits.shape[1]  # others cannot be sampled anyway
    ]
    if entries:
        rows, token_ids = zip(*entries, strict=True)
        logits[_index(logits, rows, token_ids)] = -torch.inf


def apply_penalties(logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> None:
    """Apply repetition, then frequency and presence penalties, in place.

    Needs two dense [P, V] tables, P being the rows with a penalty.
    """
    rows = [row for row, item in enumerate(inputs) if _is_penalised(item)]
    if not rows:
        return
    penalised = [inputs[row] for row in rows]
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    in_prompt = count_tokens([item.prompt_token_ids for item in penalised], logits) > 0
    counts = count_tokens([item.output_token_ids for item in penalised], logits)

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    values = logits[index]
    repetition = column([item.params.repetition_penalty for item in penalised])
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(in_prompt | (counts > 0), repeated, values)
    values -= column([item.params.frequency_penalty for item in penalised]) * counts
    values -= column([item.params.presence_penalty for item in penalised]) * (counts > 0)
    logits[index] = values


def count_tokens(sequences: Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
    """Return how often each token occurs in each sequence, [len(sequences), V] like `like`."""
    lengths = [len(sequence) for sequence in sequences]
    flat = np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=sum(lengths))
    rows = np.repeat(np.arange(len(sequences), dtype=np.int64), lengths)
    vocab_size = like.shape[1]
    counts = like.new_zeros(len(sequences) * vocab_size)
    where = torch.from_numpy(rows * vocab_size + flat).to(like.device)
    counts.index_add_(0, where, like.new_ones(1).expand(len(flat)))
    return counts.view(len(sequences), vocab_size)


def _is_too_short(item: SamplingInput) -> bool:
    return len(item.output_token_ids) < item.params.min_tokens


def _is_penalised(item: SamplingInput) -> bool:
    params = item.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _index(
    logits: torch.Tensor, rows: Sequence[int], columns: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.tensor((rows, columns), dtype=torch.int64, device=logits.device)
    return both[0], both[1]
