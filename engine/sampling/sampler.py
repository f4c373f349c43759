"""Chooses one token per row of logits. Stateless: the same inputs give the same tokens, always.

Order of a row: mask, logit bias, minimum length, penalties; then the argmax if it is greedy; else
temperature, min-p, top-k, top-p, and the argmax with Gumbel noise, which samples from the softmax.
Every stage works on all rows that use it at once, and a stage that no row uses costs nothing; an
all-greedy batch is one argmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.host_copy import HostCopies, upload
from engine.sampling.inputs import SampledToken, SamplingInput
from engine.sampling.logprobs import PendingLogprobs, launch_logprobs
from engine.sampling.noise import gumbel, row_key
from engine.sampling.penalties import apply_adjustments, needs_adjustment
from engine.sampling.token_mask import TokenMask, mask_tokens
from engine.sampling.truncation import apply_min_p, apply_top_k_top_p

SMALLEST_TEMPERATURE = 1e-30
"""What a smaller temperature becomes, because it would be 0 in float32."""


@dataclass(frozen=True, slots=True)
class PendingSample:
    """Chosen tokens on their way to the host.

    Attributes:
        token_ids: [L] int64 on the device, for a next step that does not wait for the host.
        host_ids: the same on the host, once the copies are here.
        logprob_rows: the rows whose request wants log-probabilities.
        logprobs: of these rows; None if there are none.
    """

    token_ids: torch.Tensor
    host_ids: torch.Tensor
    logprob_rows: Sequence[int]
    logprobs: PendingLogprobs | None

    def token_lists(self) -> list[list[int]]:
        """Return the id of each row's token, as steps with drafts do, once the copies are here."""
        return [[token_id] for token_id in self.host_ids.tolist()]

    def collect(self) -> list[SampledToken]:
        """Return one token per row, once the copies are here."""
        found = self.logprobs.collect() if self.logprobs is not None else []
        logprobs = dict(zip(self.logprob_rows, found, strict=True))
        return [
            SampledToken(token_id, logprobs.get(row))
            for row, token_id in enumerate(self.host_ids.tolist())
        ]


class Sampler:
    """Sampling over a vocabulary of `vocab_size` tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken]:
        """Choose one token per row and wait for it.

        Args:
            logits: [L, V] float32, V >= vocab_size (columns beyond it are padding); not changed.
            inputs: the L requests behind the rows.
        """
        copies = HostCopies(logits.device)
        pending = self.launch(logits, inputs, copies)
        copies.close()
        copies.wait()
        return pending.collect()

    def launch(
        self,
        logits: torch.Tensor,
        inputs: Sequence[SamplingInput],
        copies: HostCopies,
        *,
        unread_ids: torch.Tensor | None = None,
        mask: TokenMask | None = None,
    ) -> PendingSample:
        """Choose one token per row on the device; the host does not wait.

        Args:
            logits: as for `sample`.
            inputs: the L requests behind the rows; read now.
            copies: take the results to the host.
            unread_ids: [L] int64 on the device; the last output token of rows with `num_unread`.
            mask: what the constraints of some rows leave.
        """
        assert logits.shape[0] == len(inputs)
        raw = logits[:, : self.vocab_size]
        token_ids = self.choose(raw, inputs, unread_ids=unread_ids, mask=mask)
        rows = [row for row, item in enumerate(inputs) if item.params.num_logprobs >= 0]
        logprobs = None
        if rows:
            num_top = [inputs[row].params.num_logprobs for row in rows]
            chosen = _take(token_ids, rows)
            logprobs = launch_logprobs(_take(raw, rows), chosen, num_top, copies)
        return PendingSample(token_ids, copies.add(token_ids), rows, logprobs)

    def choose(
        self,
        logits: torch.Tensor,
        inputs: Sequence[SamplingInput],
        *,
        unread_ids: torch.Tensor | None = None,
        mask: TokenMask | None = None,
    ) -> torch.Tensor:
        """Return one token per row, [L] int64 on the device; for arguments see `launch`."""
        raw = logits[:, : self.vocab_size]
        if not inputs:
            return torch.zeros(0, dtype=torch.int64, device=raw.device)
        adjusted = raw
        if mask is not None or any(needs_adjustment(item) for item in inputs):
            adjusted = raw.clone()  # log-probabilities are of what the model said
            if mask is not None:
                mask_tokens(adjusted, mask)
            apply_adjustments(adjusted, inputs, unread_ids=unread_ids)
        random_rows = [row for row, item in enumerate(inputs) if not item.params.is_greedy]
        if not random_rows:
            return adjusted.argmax(dim=-1)
        if len(random_rows) == len(inputs):
            return _draw(adjusted, inputs)
        drawn = _draw(_take(adjusted, random_rows), [inputs[row] for row in random_rows])
        (index,) = upload([np.array(random_rows, dtype=np.int64)], raw.device)
        return adjusted.argmax(dim=-1).index_copy_(0, index, drawn)


def _take(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows, ascending; the tensor itself if they are all."""
    if len(rows) == len(tensor):
        return tensor
    (index,) = upload([np.array(rows, dtype=np.int64)], tensor.device)
    return tensor[index]


def _draw(logits: torch.Tensor, inputs: Sequence[SamplingInput]) -> torch.Tensor:
    """Draw one token per row from the scaled and truncated softmax, [R] int64.

    Args:
        logits: [R, V] float32 after adjustments; not changed.
        inputs: the R requests, none of them greedy.
    """
    params = [item.params for item in inputs]
    wanted = [max(item.temperature, SMALLEST_TEMPERATURE) for item in params]
    (temperatures,) = upload([np.array(wanted, dtype=np.float32)], logits.device)
    # The maximum goes first, so that no temperature however small can make infinities meet.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    apply_min_p(scaled, params)
    apply_top_k_top_p(scaled, params)
    keys = [row_key(item.params.seed, item.output_index) for item in inputs]
    return scaled.add_(gumbel(keys, logits.shape[1], logits.device)).argmax(dim=-1)
