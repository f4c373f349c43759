"""The work of a decode step of fixed shape, in the parts that are captured, and what comes of it.

`StepGraphs` decides when each part runs, and on what; here is what it does, for one token a
request. With drafts it is `drafting_body`. A body owns the static tensors that its parts leave, and
reads those that `StaticInputs` owns. Every method is called on the thread that launches steps.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.graphs.inputs import DecodeInputs, StaticInputs
from engine.host_copy import HostCopies, upload
from engine.memory.kv_pool import KVPool
from engine.runner import CausalModel
from engine.sampling.accepted import PendingAccepted
from engine.sampling.graph_sampler import GraphSampler, SamplingStage
from engine.sampling.logprobs import PendingLogprobs, launch_logprobs
from engine.sampling.sampler import PendingSample
from engine.sampling.token_mask import TokenMask, mask_tokens


class StepBody(Protocol):
    """What a step of `bucket` sequences does, part by part."""

    @property
    def has_drafts(self) -> bool:
        """Whether `run_drafts` does anything."""
        ...

    @property
    def drafts_SK(self) -> Tensor | None:
        """Drafts by slot, [S, K] int64; `NO_DRAFT` where there is none."""
        ...

    def prepare(self, bucket: int) -> None:
        """Run the model once, for the largest size, and allocate what depends on its results."""
        ...

    def run_model(self, bucket: int) -> None:
        """From token ids to final hidden states."""
        ...

    def run_head(self, bucket: int, stage: SamplingStage, mask: TokenMask | None = None) -> None:
        """From hidden states to tokens; a mask cannot be captured."""
        ...

    def run_drafts(self, bucket: int, stage: SamplingStage) -> None:
        """Guess the tokens after those; every rank that shares the model runs it, or none."""
        ...

    def launch_sample(
        self, inputs: DecodeInputs, copies: HostCopies
    ) -> tuple[PendingSample | PendingAccepted, Tensor]:
        """Start to copy out the tokens and, as [S] bool, which are usable; after `run_head`.

        Copies on the device come first: the next step overwrites the static tensors, maybe before
        the host reads these.
        """
        ...


class TokenBody:
    """One token of each request, and the next one: a `StepBody` without drafts."""

    has_drafts = False
    drafts_SK = None

    def __init__(
        self, model: CausalModel, kv_pool: KVPool, static: StaticInputs, sampler: GraphSampler
    ) -> None:
        """Allocate for as many sequences as `static` has."""
        most, device = static.max_num_seqs, kv_pool.device
        self._model, self._kv_pool = model, kv_pool
        self._static, self._sampler = static, sampler
        self._hidden = torch.empty(0, device=device)  # [max_num_seqs, D] from `prepare` on
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._is_usable = torch.zeros(most, dtype=torch.bool, device=device)

    def prepare(self, bucket: int) -> None:
        """See `StepBody`."""
        hidden = self._model.forward(self._static.batch(bucket), self._kv_pool)
        self._hidden = torch.empty_like(hidden)

    def run_model(self, bucket: int) -> None:
        """See `StepBody`."""
        hidden = self._model.forward(self._static.batch(bucket), self._kv_pool)
        self._hidden[:bucket].copy_(hidden)

    def run_head(self, bucket: int, stage: SamplingStage, mask: TokenMask | None = None) -> None:
        """See `StepBody`."""
        logits = self._model.compute_logits(self._hidden[:bucket])
        # A sum is finite only if every term is, and reads the logits once.
        self._is_usable[:bucket].copy_(torch.isfinite(logits.sum(dim=-1)))
        if mask is not None:
            mask_tokens(logits[:, : self._sampler.vocab_size], mask)
        rows = self._static.sampling_rows(bucket)
        self._tokens[:bucket].copy_(self._sampler.choose(logits, rows, stage))

    def run_drafts(self, bucket: int, stage: SamplingStage) -> None:
        """See `StepBody`."""

    def launch_sample(
        self, inputs: DecodeInputs, copies: HostCopies
    ) -> tuple[PendingSample, Tensor]:
        """See `StepBody`."""
        num_seqs = inputs.num_seqs
        tokens, is_usable = self._tokens[:num_seqs].clone(), self._is_usable[:num_seqs].clone()
        rows = [row for row, wanted in enumerate(inputs.num_logprobs) if wanted >= 0]
        sample = PendingSample(
            token_ids=tokens,
            host_ids=copies.add(tokens),
            logprob_rows=rows,
            logprobs=launch_row_logprobs(
                self._logits_of, tokens, rows, [inputs.num_logprobs[row] for row in rows], copies
            ),
        )
        return sample, copies.add(is_usable)

    def _logits_of(self, rows: Tensor) -> Tensor:
        logits = self._model.compute_logits(self._hidden.index_select(0, rows))
        return logits[:, : self._sampler.vocab_size]


def launch_row_logprobs(
    logits_of: Callable[[Tensor], Tensor],
    tokens: Tensor,
    rows: Sequence[int],
    num_top: Sequence[int],
    copies: HostCopies,
) -> PendingLogprobs | None:
    """Compute the logits of some rows again: the graphs keep none, and few ask for them.

    Args:
        logits_of: returns [L, V] float32 of row numbers [L] int64, without padding.
        tokens: [T] int64, chosen in all rows.
        rows: L of them; none gives None.
        num_top: of each of these, as `num_logprobs` of `SamplingParams`.
        copies: take the results to the host.
    """
    if not rows:
        return None
    (index,) = upload([np.array(rows, dtype=np.int64)], tokens.device)
    return launch_logprobs(logits_of(index), tokens.index_select(0, index), num_top, copies)
