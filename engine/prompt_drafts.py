"""The layer for multi-token prediction behind a step of prompts: its KV, and the first drafts.

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
    ) -> Tensor | None:
        """Issue the layer behind a step that this rank sampled in; the host does not wait.

        Args:
            scheduled: what ran.
            batch: of these.
            hidden_TD: what the model returned.
            sampled_ids_L: tokens of those that sample, in order, int64; None if none does.

        Returns:
            [L, D] of the sampled rows, for `choose`; None if there are none.
        """
        known = chain.from_iterable(_followers(item) for item in scheduled)
        next_ids, rows = upload(
            [np.fromiter(known, dtype=np.int64), np.array(sampled_rows(scheduled), dtype=np.int64)],
            hidden_TD.device,
        )
        if sampled_ids_L is None:
            self._run(batch, hidden_TD, next_ids)
            return None
        next_ids.index_copy_(0, rows, sampled_ids_L)
        return self._run(batch, hidden_TD, next_ids).index_select(0, rows)

    def choose(
        self,
        scheduled: Sequence[ScheduledRequest],
        drafted_LD: Tensor,
        sampled_ids_L: Tensor,
        copies: HostCopies,
    ) -> Tensor:
        """Draft the token after each sampled one, as it will be sampled; no collective.

        Args:
            scheduled: what ran.
            drafted_LD: of `run`.
            sampled_ids_L: as there.
            copies: take the drafts to the host.

        Returns:
            [L] int64 on the host, once the copies are there.
        """
        samplers = [item for item in scheduled if item.samples]
        logits = self.model.compute_logits(drafted_LD)
        finite = torch.isfinite(logits.sum(dim=-1))
        logits = torch.where(finite[:, None], logits, 0.0)  # any draft will do then
        inputs = [_input_behind(item) for item in samplers]
        return copies.add(self.sampler.choose(logits, inputs, unread_ids=sampled_ids_L))

    def follow(self, batch: ForwardBatch, hidden_TD: Tensor) -> None:
        """Take part behind a step that another rank of the group samples in, or nobody does."""
        self._run(batch, hidden_TD, torch.zeros_like(batch.input_ids))

    def _run(self, batch: ForwardBatch, hidden_TD: Tensor, next_ids_T: Tensor) -> Tensor:
        told = self.group.broadcast(next_ids_T)
        return self.model.forward_mtp(hidden_TD, told, batch, self.kv_pool)


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
