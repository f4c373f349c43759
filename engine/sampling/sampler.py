"""Chooses one token per row of logits. Stateless: the same inputs give the same tokens, always.

Order of a row: logit bias, minimum length, penalties; then the argmax if it is greedy; else
temperature, min-p, top-k, top-p, and the argmax with Gumbel noise, which samples from the softmax.
Every stage works on all rows that use it at once, and a stage that no row uses costs nothing; an
all-greedy batch is one argmax.
"""

from collections.abc import Sequence

import torch

from engine.sampling.inputs import SampledToken, SamplingInput
from engine.sampling.logprobs import position_logprobs
from engine.sampling.noise import gumbel, row_key
from engine.sampling.penalties import apply_adjustments, needs_adjustment
from engine.sampling.truncation import apply_min_p, apply_top_k_top_p
from runtime.sampling import PositionLogprobs

_SMALLEST_TEMPERATURE = 1e-30  # smaller ones would be 0 in float32


class Sampler:
    """Sampling over a vocabulary of `vocab_size` tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken]:
        """Choose one token per row.

        Args:
            logits: [L, V] float32, V >= vocab_size (columns beyond it are padding); not changed.
            inputs: the L requests behind the rows.
        """
        assert logits.shape[0] == len(inputs)
        if not inputs:
            return []
        raw = logits[:, : self.vocab_size]
        token_ids = self._choose(raw, inputs).tolist()
        logprobs = _chosen_logprobs(raw, token_ids, inputs)
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]

    def _choose(self, raw: torch.Tensor, inputs: Sequence[SamplingInput]) -> torch.Tensor:
        """Return the chosen tokens, [L] int64."""
        adjusted = raw
        if any(needs_adjustment(item) for item in inputs):
            adjusted = raw.clone()
            apply_adjustments(adjusted, inputs)
        random_rows = [row for row, item in enumerate(inputs) if not item.params.is_greedy]
        if not random_rows:
            return adjusted.argmax(dim=-1)
        if len(random_rows) == len(inputs):
            return _draw(adjusted, inputs)
        token_ids = adjusted.argmax(dim=-1)
        token_ids[random_rows] = _draw(adjusted[random_rows], [inputs[row] for row in random_rows])
        return token_ids


def _chosen_logprobs(
    raw: torch.Tensor, token_ids: Sequence[int], inputs: Sequence[SamplingInput]
) -> dict[int, PositionLogprobs]:
    """Return the log-probabilities by row, of the rows whose request wants them."""
    rows = [row for row, item in enumerate(inputs) if item.params.num_logprobs >= 0]
    if not rows:
        return {}
    logprobs = position_logprobs(
        raw if len(rows) == len(inputs) else raw[rows],
        [token_ids[row] for row in rows],
        [inputs[row].params.num_logprobs for row in rows],
    )
    return dict(zip(rows, logprobs, strict=True))


def _draw(logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> torch.Tensor:
    """Draw one token per row from the scaled and truncated softmax, [R] int64.

    Args:
        logits: [R, V] float32 after adjustments; not changed.
        inputs: the R requests, none of them greedy.
    """
    params = [item.params for item in inputs]
    temperatures = torch.tensor(
        [max(item.temperature, _SMALLEST_TEMPERATURE) for item in params], device=logits.device
    )
    # The maximum goes first, so that no temperature however small can make infinities meet.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    apply_min_p(scaled, params)
    apply_top_k_top_p(scaled, params)
    keys = [row_key(item.params.seed, len(item.output_token_ids)) for item in inputs]
    return scaled.add_(gumbel(keys, logits.shape[1], logits.device)).argmax(dim=-1)
