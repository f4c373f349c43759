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

from engine.host_copy import upload
from engine.sampling.inputs import SamplingInput
from runtime.sampling import SamplingParams


def needs_adjustment(item: SamplingInput) -> bool:
    """Whether any function of this module would change the row of `item`."""
    return bool(item.params.logit_bias) or _is_too_short(item) or is_penalised(item.params)


def apply_adjustments(
    logits: torch.Tensor,
    inputs: Sequence[SamplingInput],
    *,
    unread_ids: torch.Tensor | None = None,
) -> None:
    """Apply bias, minimum length and penalties in this order, in place."""
    apply_logit_bias(logits, inputs)
    mask_stop_tokens(logits, inputs)
    apply_penalties(logits, inputs, unread_ids=unread_ids)


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
        logits[index] += upload([np.array(biases, dtype=np.float32)], logits.device)[0]


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
        # As a tensor: a plain number would be sent to the device, which the host waits for.
        logits[_index(logits, rows, token_ids)] = logits.new_full((1,), -torch.inf)


def apply_penalties(
    logits: torch.Tensor,
    inputs: Sequence[SamplingInput],
    *,
    unread_ids: torch.Tensor | None = None,
) -> None:
    """Apply repetition, then frequency and presence penalties, in place.

    Needs two dense [P, V] tables, P being the rows with a penalty.

    Args:
        logits: [L, V].
        inputs: the L requests.
        unread_ids: [L] int64 on the device; the last output token of rows with `num_unread`.
    """
    rows = [row for row, item in enumerate(inputs) if is_penalised(item.params)]
    if not rows:
        return
    penalised_inputs = [inputs[row] for row in rows]
    columns = np.array(
        [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty, item.num_unread)
            for item in penalised_inputs
            for p in [item.params]
        ],
        dtype=np.float32,
    )
    index, table = upload([np.array(rows, dtype=np.int64), columns], logits.device)
    in_prompt = count_tokens([item.prompt_token_ids for item in penalised_inputs], logits) > 0
    counts = count_tokens([item.output_token_ids for item in penalised_inputs], logits)
    repetition, frequency, presence, num_unread = (table[:, i, None] for i in range(4))
    if any(item.num_unread for item in penalised_inputs):
        assert unread_ids is not None, "an unread token, and nobody says which"
        counts.scatter_add_(1, unread_ids[index][:, None], num_unread)
    logits[index] = penalised(
        logits[index],
        in_prompt,
        counts,
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )


def penalised(
    values: torch.Tensor,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    *,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Return logits after repetition, then frequency and presence penalties.

    Args:
        values: [P, V] float32.
        in_prompt: [P, V] bool.
        counts: [P, V] float32, how often each token occurs in the output.
        repetition: [P, 1] float32; 1 changes nothing.
        frequency: [P, 1] float32; 0 changes nothing.
        presence: [P, 1] float32; 0 changes nothing.
    """
    is_in_output = counts > 0
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(in_prompt | is_in_output, repeated, values)
    return values - frequency * counts - presence * is_in_output


def count_tokens(sequences: Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
    """Return how often each token occurs in each sequence, [len(sequences), V] like `like`."""
    lengths = [len(sequence) for sequence in sequences]
    flat = np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=sum(lengths))
    rows = np.repeat(np.arange(len(sequences), dtype=np.int64), lengths)
    vocab_size = like.shape[1]
    counts = like.new_zeros(len(sequences) * vocab_size)
    (where,) = upload([rows * vocab_size + flat], like.device)
    counts.index_add_(0, where, like.new_ones(1).expand(len(flat)))
    return counts.view(len(sequences), vocab_size)


def _is_too_short(item: SamplingInput) -> bool:
    return item.output_index < item.params.min_tokens


def is_penalised(params: SamplingParams) -> bool:
    """Whether any penalty changes a logit."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _index(
    logits: torch.Tensor, rows: Sequence[int], columns: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    row_ids, column_ids = upload(
        [np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64)], logits.device
    )
    return row_ids, column_ids
