"""The work of a decode step that verifies drafts and makes the next ones: see `step_body`.

Three parts. The model runs every sequence's last token and its K drafts (`draft_rows`). The head
chooses a token in every row, one row of all sequences after another, with the sampler of a step
without drafts: its noise is a function of seed, output index and token, so what it chooses does not
depend on how the row came about. A row counts if its draft is what the row before it has chosen.
Then the layer for multi-token prediction runs over the same rows, whose successors are known now,
and the sampler chooses the next first draft where the last row that counts stands: with the noise,
the truncation and the penalties of that output index, because then model and layer agree most
often. Further drafts come from running the layer on its own output, a row a sequence.

Penalties of a row count the drafts before it: each row's choice is counted before the next row is
sampled, and a row behind one that does not count is sampled in the slot of padding. The drafts that
the layer makes are counted likewise, and forgotten at the end.

Which tokens come of a step does not depend on the drafts, nor on the KV of that layer, which may
hold anything for positions that it has not run. Legend: B sequences, R = K + 1 rows of each, D
hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.graphs.draft_rows import NO_DRAFT
from engine.graphs.inputs import DecodeInputs, StaticInputs
from engine.host_copy import HostCopies, upload
from engine.memory.kv_pool import KVPool
from engine.model.spec import DraftingModel
from engine.sampling.accepted import AcceptedTokens, PendingAccepted
from engine.sampling.graph_sampler import GraphSampler, SamplingRows, SamplingStage
from engine.sampling.logprobs import PendingLogprobs, launch_logprobs
from engine.sampling.token_mask import TokenMask, mask_tokens


class DraftingBody:
    """One token and K drafts of each request, 1 to K + 1 tokens, and K new drafts: a `StepBody`."""

    has_drafts = True

    def __init__(
        self,
        model: DraftingModel,
        kv_pool: KVPool,
        static: StaticInputs,
        sampler: GraphSampler,
        *,
        num_drafts: int,
    ) -> None:
        """Allocate for as many sequences as `static` has, of `num_drafts` drafts each."""
        assert num_drafts > 0
        most, device = static.max_num_seqs, kv_pool.device
        self._model, self._kv_pool = model, kv_pool
        self._static, self._sampler = static, sampler
        self._num_rows = num_drafts + 1
        self._hidden = torch.empty(0, device=device)  # [max_num_seqs * R, D] from `prepare` on
        self._tokens = torch.zeros((most, self._num_rows), dtype=torch.int64, device=device)
        self._counts = torch.ones(most, dtype=torch.int64, device=device)
        self._is_usable = torch.zeros(most, dtype=torch.bool, device=device)
        num_slots = sampler.num_slots + 1
        self.drafts_SK = torch.full((num_slots, num_drafts), NO_DRAFT, device=device)

    def prepare(self, bucket: int) -> None:
        """See `StepBody`."""
        hidden = self._model.forward(self._verifying(bucket), self._kv_pool)
        self._hidden = torch.empty_like(hidden)

    def run_model(self, bucket: int) -> None:
        """See `StepBody`."""
        hidden = self._model.forward(self._verifying(bucket), self._kv_pool)
        self._hidden[: len(hidden)].copy_(hidden)

    def run_head(self, bucket: int, stage: SamplingStage, mask: TokenMask | None = None) -> None:
        """See `StepBody`; a mask names sequences, of which the first rows are bound."""
        num_rows = self._num_rows
        logits = self._model.compute_logits(self._hidden[: bucket * num_rows])
        # A sum is finite only if every term is, and reads the logits once.
        is_finite = torch.isfinite(logits.sum(dim=-1)).view(bucket, num_rows)
        if mask is not None:
            mask_tokens(
                logits[:, : self._sampler.vocab_size], replace(mask, rows=mask.rows * num_rows)
            )
        logits_BRV = logits.view(bucket, num_rows, -1)
        drafts = self._static.drafted(bucket, self.drafts_SK).usable_drafts()
        rows = self._sampling_rows(bucket)
        is_counting = torch.ones_like(is_finite[:, 0])
        counts = torch.zeros_like(rows.slot)
        for row in range(num_rows):
            if row:
                # A row whose logits are not usable is left to a step of which it is the first.
                agrees = self._tokens[:bucket, row - 1] == drafts[:, row - 1]
                is_counting = is_counting & agrees & is_finite[:, row]
            slot = torch.where(is_counting, rows.slot, self._sampler.num_slots)
            here = replace(rows, slot=slot, output_index=rows.output_index + row)
            chosen = self._sampler.choose(logits_BRV[:, row], here, stage)
            self._tokens[:bucket, row].copy_(chosen)
            counts = counts + is_counting
        self._counts[:bucket].copy_(counts)
        self._is_usable[:bucket].copy_(is_finite[:, 0])

    def run_drafts(self, bucket: int, stage: SamplingStage) -> None:
        """See `StepBody`."""
        sequences = self._static.drafted(bucket, self.drafts_SK)
        rows, counts = self._sampling_rows(bucket), self._counts[:bucket]
        tokens, batch = self._tokens[:bucket], self._verifying(bucket)
        hidden = self._run_layer(self._hidden[: batch.num_tokens], tokens.flatten(), batch)
        last = torch.arange(bucket, device=counts.device) * self._num_rows + counts - 1
        hidden = hidden.index_select(0, last)
        drafts: list[Tensor] = []
        for behind in range(self._num_rows - 1):
            if behind:
                batch = sequences.drafting(drafts[-1], sequences.positions_B + counts + behind - 1)
                hidden = self._run_layer(hidden, drafts[-1], batch)
            here = replace(rows, output_index=rows.output_index + counts + behind)
            drafts.append(self._sampler.choose(self._model.compute_logits(hidden), here, stage))
        if stage is SamplingStage.FULL:
            for draft in drafts:
                self._sampler.forget(draft, rows.slot)
        self.drafts_SK.index_copy_(0, rows.slot, torch.stack(drafts, dim=1))

    def launch_sample(
        self, inputs: DecodeInputs, copies: HostCopies
    ) -> tuple[PendingAccepted, Tensor]:
        """See `StepBody`."""
        num_seqs = inputs.num_seqs
        accepted = AcceptedTokens(
            token_ids=self._tokens[:num_seqs].clone(), counts=self._counts[:num_seqs].clone()
        )
        requests = [place for place, wanted in enumerate(inputs.num_logprobs) if wanted >= 0]
        logprobs = self._launch_logprobs(accepted, requests, inputs.num_logprobs, copies)
        sample = PendingAccepted.start(accepted, requests, logprobs, copies)
        return sample, copies.add(self._is_usable[:num_seqs].clone())

    def _launch_logprobs(
        self,
        accepted: AcceptedTokens,
        requests: Sequence[int],
        num_top: Sequence[int],
        copies: HostCopies,
    ) -> PendingLogprobs | None:
        """Compute the logits of all rows of some requests again: see `TokenBody`."""
        if not requests:
            return None
        num_rows = self._num_rows
        rows = [place * num_rows + row for place in requests for row in range(num_rows)]
        (index,) = upload([np.array(rows, dtype=np.int64)], self._hidden.device)
        logits = self._model.compute_logits(self._hidden.index_select(0, index))
        raw = logits[:, : self._sampler.vocab_size]
        chosen = accepted.token_ids.flatten().index_select(0, index)
        return launch_logprobs(raw, chosen, [num_top[row // num_rows] for row in rows], copies)

    def _verifying(self, bucket: int) -> ForwardBatch:
        return self._static.drafted(bucket, self.drafts_SK).verifying()

    def _sampling_rows(self, bucket: int) -> SamplingRows:
        """Return what the sampler is told of the first row of each sequence."""
        rows = self._static.sampling_rows(bucket)
        return replace(rows, output_index=rows.output_index + self._static.num_ahead(bucket))

    def _run_layer(self, hidden: Tensor, next_ids: Tensor, batch: ForwardBatch) -> Tensor:
        return self._model.forward_mtp(hidden, next_ids, batch, self._kv_pool)
