"""The layer for multi-token prediction behind a step of the plain runner: its KV, first drafts.

Decode verifies drafts from its first step on, so prefill leaves what that needs: the KV that the
layer keeps for every token of the prompt, and, for a prompt that is complete, a draft of the token
after the first. The layer reads each token's final hidden state beside the token that follows. That
is the next one of the prompt; of a prompt's last token it is the one that the step has just
sampled, so the layer comes behind the sampler, in the same step: what the step completes of a block
is complete with this layer's KV.

Of a tensor-parallel group rank 0 alone samples, and tells the others on the device which tokens
follow. Ranks that only share experts meet in the layer as in any other; an idle one joins.

Where a prefix was cached, the KV at its last token is of whatever followed it then. Drafts may be
worse for it by that one position, and what decode accepts of them is what its sampler says.

`PromptDrafts` does this. Decode's steps have fixed shapes and run the layer themselves; behind one
that has not `LayerKV` writes what the layer keeps of its tokens.

Legend: T tokens of the step, L sampled rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch, sampled_rows
from engine.host_copy import HostCopies, upload
from engine.memory.kv_pool import KVPool
from engine.model.spec import DraftingModel
from engine.parallel.groups import RankGroup
from engine.request import ScheduledRequest
from engine.sampling.inputs import SamplingInput
from engine.sampling.sampler import Sampler
from engine.step_error import may_fail


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDrafts:
    """Runs the layer behind the steps of one rank.

    Attributes:
        model: of the rank.
        kv_pool: with the layer's KV.
        sampler: the one that chooses tokens.
        group: ranks that run the same tokens, of which rank 0 samples.
    """

    model: DraftingModel
    kv_pool: KVPool
    sampler: Sampler
    group: RankGroup

    def run(
        self,
        scheduled: Sequence[ScheduledRequest],
        batch: ForwardBatch,
        hidden_TD: Tensor,
        sampled_ids_L: Tensor | None,
        copies: HostCopies,
    ) -> Tensor | None:
        """See `BehindSteps`: the layer, and a draft of the token after each sampled one."""
        next_ids, rows = _next_ids(scheduled, sampled_ids_L, hidden_TD.device)
        drafted_TD = self._run(batch, hidden_TD, next_ids)
        if sampled_ids_L is None:
            return None
        with may_fail(hidden_TD.device, has_joined=True):  # no collective follows
            return self._choose(scheduled, drafted_TD.index_select(0, rows), sampled_ids_L, copies)

    def _choose(
        self,
        scheduled: Sequence[ScheduledRequest],
        drafted_LD: Tensor,
        sampled_ids_L: Tensor,
        copies: HostCopies,
    ) -> Tensor:
        """Draft the token after each sampled one, as it will be sampled: [L] int64 on the host."""
        samplers = [item for item in scheduled if item.samples]
        logits = self.model.compute_logits(drafted_LD)
        finite = torch.isfinite(logits.sum(dim=-1))
        logits = torch.where(finite[:, None], logits, 0.0)  # any draft will do then
        inputs = [_input_behind(item) for item in samplers]
        return copies.add(self.sampler.choose(logits, inputs, unread_ids=sampled_ids_L))

    def follow(self, batch: ForwardBatch, hidden_TD: Tensor) -> None:
        """See `BehindSteps`."""
        self._run(batch, hidden_TD, torch.zeros_like(batch.input_ids))

    def _run(self, batch: ForwardBatch, hidden_TD: Tensor, next_ids_T: Tensor) -> Tensor:
        told = self.group.broadcast(next_ids_T)
        return self.model.forward_mtp(hidden_TD, told, batch, self.kv_pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """Writes the layer's KV behind steps of decode that have no drafts and are not of fixed shape.

    A step of fixed shape does so itself. Without it the layer would find nothing at these tokens
    later, and draft worse for as long as they are in its context. No rank waits for another in it.

    Attributes:
        model: of the rank.
        kv_pool: with the layer's KV.
    """

    model: DraftingModel
    kv_pool: KVPool

    def run(
        self,
        scheduled: Sequence[ScheduledRequest],
        batch: ForwardBatch,
        hidden_TD: Tensor,
        sampled_ids_L: Tensor | None,
        copies: HostCopies,
    ) -> Tensor | None:
        """See `BehindSteps`: no drafts."""
        next_ids, _ = _next_ids(scheduled, sampled_ids_L, hidden_TD.device)
        self.model.remember_mtp(hidden_TD, next_ids, batch, self.kv_pool)
        return None

    def follow(self, batch: ForwardBatch, hidden_TD: Tensor) -> None:
        """See `BehindSteps`: what was padding leaves nothing."""


def _next_ids(
    scheduled: Sequence[ScheduledRequest], sampled_ids_L: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what follows each token of a step, [T] int64, and the rows that were sampled, [L]."""
    known = chain.from_iterable(_followers(item) for item in scheduled)
    next_ids_T, rows_L = upload(
        [np.fromiter(known, dtype=np.int64), np.array(sampled_rows(scheduled), dtype=np.int64)],
        device,
    )
    if sampled_ids_L is not None:
        next_ids_T.index_copy_(0, rows_L, sampled_ids_L)
    return next_ids_T, rows_L


def _followers(item: ScheduledRequest) -> list[int]:
    """Return what follows each token of a chunk; 0 for what is being sampled."""
    if not item.samples:
        return item.request.token_ids(item.start + 1, item.end + 1)
    return [*item.request.token_ids(item.start + 1, item.end), 0]


def _input_behind(item: ScheduledRequest) -> SamplingInput:
    """Return how the token after the one that is being sampled is chosen."""
    assert not item.num_unread, "a chunk of a prompt, whose tokens are known"
    request = item.request
    return SamplingInput(
        request.sampling, request.prompt_token_ids, request.output_token_ids, num_unread=1
    )
