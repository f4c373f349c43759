"""The work of a decode step that verifies drafts and makes the next ones: see `step_body`.

Three parts. The model runs every sequence's last token and its K drafts (`draft_rows`). The head
chooses a token in every row with the sampler of a step without drafts: its noise is a function of
seed, output index and token, so what it chooses does not depend on how the row came about. A row
counts if its draft is what the row before it has chosen. Then the layer for multi-token prediction
runs over the same rows, whose successors are known now, and the sampler chooses the next first
draft where the last row that counts stands: with the noise, the truncation and the penalties of
that output index, because then model and layer agree most often. Where steps are called, the layer
is asked about that row alone (`engine.asking_rows`). Further drafts come from running the layer on
its own output, a row a sequence.

Penalties of a row count the drafts before it: one row of all sequences is sampled after another,
each row's choice is counted before the next, and a row behind one that does not count is sampled in
the slot of padding. The drafts that the layer makes are counted likewise, and forgotten at the end.
Where all sequences are greedy and none has penalties, nothing is counted, and steps that are called
sample all rows at once.

Which tokens come of a step does not depend on the drafts, nor on the KV of that layer, which may
hold anything for positions that it has not run.

Where K is chosen anew before every step there is a body for each, over one `DraftState`: a step may
follow one of any other K, also one that is not read. Without drafts (K = 0) the layer's KV is still
written, which takes its projections and no attention, experts or exchange; so drafts are as good
as ever when they are turned on again. Legend: B sequences, R = K + 1 rows of each, D hidden size.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.asking_rows import LastRows
from engine.batch import ForwardBatch
from engine.graphs.draft_rows import DraftedSequences
from engine.graphs.inputs import DecodeInputs, StaticInputs
from engine.graphs.step_body import launch_row_logprobs
from engine.host_copy import HostCopies
from engine.memory.kv_pool import KVPool
from engine.model.spec import DraftingModel
from engine.sampling.accepted import AcceptedTokens, PendingAccepted
from engine.sampling.graph_sampler import GraphSampler, SamplingRows, SamplingStage
from engine.sampling.token_mask import NO_DRAFT, TokenMask, mask_tokens


class _Loaded(NamedTuple):
    """What the parts of a step share.

    Attributes:
        load: of the inputs that it was made of, and the bucket.
        sequences: of the step.
    """

    load: tuple[int, int]
    sequences: DraftedSequences


class DraftState:
    """What steps leave on the device for their parts and for one another, whatever their K.

    Attributes:
        hidden: [rows, D] final hidden states of a step; empty until `keep_room`.
        tokens: [S, R] int64, chosen in every row, of the largest K.
        counts: [S] int64, how many of them count.
        is_usable: [S] bool, whether the logits of the first row are numbers.
        num_verified: [S] int64, drafts that it could verify.
        drafts_SK: [slots, K] int64, drafts by slot; `NO_DRAFT` where there is none.
    """

    def __init__(
        self, static: StaticInputs, sampler: GraphSampler, *, max_drafts: int, device: torch.device
    ) -> None:
        """Allocate for as many sequences as `static` has, of up to `max_drafts` drafts each."""
        most = static.max_num_seqs
        self.hidden = torch.empty(0, device=device)
        self.tokens = torch.zeros((most, max_drafts + 1), dtype=torch.int64, device=device)
        self.counts = torch.ones(most, dtype=torch.int64, device=device)
        self.is_usable = torch.zeros(most, dtype=torch.bool, device=device)
        self.num_verified = torch.zeros(most, dtype=torch.int64, device=device)
        num_slots = sampler.num_slots + 1
        self.drafts_SK = torch.full((num_slots, max_drafts), NO_DRAFT, device=device)

    def keep_room(self, hidden: Tensor) -> None:
        """Allocate for final hidden states like these, before the first capture that uses them."""
        if len(self.hidden) < len(hidden):
            self.hidden = torch.empty_like(hidden)


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
        state: DraftState | None = None,
    ) -> None:
        """Take a model with its layer for multi-token prediction, and the state of all bodies.

        Args:
            model: on the device of `kv_pool`.
            kv_pool: with that layer's KV.
            static: inputs of a step.
            sampler: of all slots.
            num_drafts: K.
            state: of K drafts or more; None for one of its own.
        """
        self._model, self._kv_pool = model, kv_pool
        self._static, self._sampler = static, sampler
        self._num_rows = num_drafts + 1
        self._state = state or DraftState(
            static, sampler, max_drafts=num_drafts, device=kv_pool.device
        )
        # What is called costs by the rows and calls that it makes, and may keep what it has made.
        # Each part of a captured step makes its own, and reads weights for all rows as for one.
        self._is_called = kv_pool.device.type == "cpu"
        self._loaded: _Loaded | None = None

    @property
    def drafts_SK(self) -> Tensor:
        """See `DraftState`."""
        return self._state.drafts_SK

    def prepare(self, bucket: int) -> None:
        """See `StepBody`."""
        batch = self._sequences(bucket).verifying
        self._state.keep_room(self._model.forward(batch, self._kv_pool))

    def run_model(self, bucket: int) -> None:
        """See `StepBody`."""
        hidden = self._model.forward(self._sequences(bucket).verifying, self._kv_pool)
        self._state.hidden[: len(hidden)].copy_(hidden)

    def run_head(self, bucket: int, stage: SamplingStage, mask: TokenMask | None = None) -> None:
        """See `StepBody`."""
        state, num_rows = self._state, self._num_rows
        logits = self._model.compute_logits(state.hidden[: bucket * num_rows])
        # A sum is finite only if every term is, and reads the logits once.
        is_finite = torch.isfinite(logits.sum(dim=-1)).view(bucket, num_rows)
        if mask is not None:
            mask_tokens(logits[:, : self._sampler.vocab_size], mask)
        drafts = self._sequences(bucket).usable_drafts
        if mask is not None and mask.drafts is not None:
            drafts = mask.drafts.leave(drafts)
        if stage is SamplingStage.GREEDY and self._is_called:
            tokens = self._choose_at_once(logits, bucket)
        else:
            tokens = self._choose_in_turn(logits, drafts, is_finite, stage)
        # A row whose logits are not usable is left to a step of which it is the first.
        agrees = (tokens[:, :-1] == drafts) & is_finite[:, 1:]
        state.tokens[:bucket, :num_rows].copy_(tokens)
        state.counts[:bucket].copy_(1 + agrees.cumprod(dim=1).sum(dim=1))
        state.is_usable[:bucket].copy_(is_finite[:, 0])
        state.num_verified[:bucket].copy_((drafts != NO_DRAFT).sum(dim=1))

    def _choose_at_once(self, logits: Tensor, bucket: int) -> Tensor:
        """Choose in all rows [B * R, V] of greedy sequences, [B, R]."""
        num_rows = self._num_rows
        behind = torch.arange(num_rows, device=logits.device)
        ahead = (self._sequences(bucket).num_ahead_B[:, None] + behind).flatten()
        rows = self._static.sampling_rows(bucket, num_rows=num_rows, ahead=ahead)
        return self._sampler.choose(logits, rows, SamplingStage.GREEDY).view(bucket, num_rows)

    def _choose_in_turn(
        self, logits: Tensor, drafts: Tensor, is_finite: Tensor, stage: SamplingStage
    ) -> Tensor:
        """Choose in all rows [B * R, V], [B, R]; a row counts what those before it have chosen."""
        bucket, num_rows = is_finite.shape
        rows, logits_BRV = self._sampling_rows(bucket), logits.view(bucket, num_rows, -1)
        is_counting = torch.ones_like(is_finite[:, 0])
        tokens: list[Tensor] = []
        for row in range(num_rows):
            if row:
                is_counting = is_counting & (tokens[-1] == drafts[:, row - 1]) & is_finite[:, row]
            slot = torch.where(is_counting, rows.slot, self._sampler.num_slots)
            here = replace(rows, slot=slot, output_index=rows.output_index + row)
            tokens.append(self._sampler.choose(logits_BRV[:, row], here, stage))
        return torch.stack(tokens, dim=1)

    def run_drafts(self, bucket: int, stage: SamplingStage) -> None:
        """See `StepBody`."""
        sequences, slot = self._sequences(bucket), self._static.slots(bucket)
        batch, counts = sequences.verifying, self._state.counts[:bucket]
        next_ids = self._state.tokens[:bucket, : self._num_rows].flatten()
        hidden = self._state.hidden[: batch.num_tokens]
        if self._num_rows == 1:
            self._model.remember_mtp(hidden, next_ids, batch, self._kv_pool)
            self._state.drafts_SK.index_fill_(0, slot, NO_DRAFT)
            return
        rows = self._sampling_rows(bucket)
        last = LastRows(place_S=counts - 1, num_rows=self._num_rows, num_seqs=sequences.num_seqs)
        hidden = self._ask(hidden, next_ids, batch, last)
        drafts: list[Tensor] = []
        for behind in range(self._num_rows - 1):
            if behind:
                batch = sequences.drafting(drafts[-1], sequences.positions_B + counts + behind - 1)
                hidden = self._model.forward_mtp(hidden, drafts[-1], batch, self._kv_pool)
            here = replace(rows, output_index=rows.output_index + counts + behind)
            drafts.append(self._sampler.choose(self._model.compute_logits(hidden), here, stage))
        if stage is SamplingStage.FULL:
            for draft in drafts:
                self._sampler.forget(draft, slot)
        none = torch.full_like(drafts[0], NO_DRAFT)
        drafts += [none] * (self.drafts_SK.shape[1] - len(drafts))
        self.drafts_SK.index_copy_(0, slot, torch.stack(drafts, dim=1))

    def _ask(self, hidden: Tensor, next_ids: Tensor, batch: ForwardBatch, last: LastRows) -> Tensor:
        """Return what the layer makes of the last row that counts of each sequence, [B, D]."""
        run_layer, pool = self._model.forward_mtp, self._kv_pool
        if self._is_called:
            return run_layer(hidden, next_ids, batch, pool, last)
        return last.of(run_layer(hidden, next_ids, batch, pool))

    def launch_sample(
        self, inputs: DecodeInputs, copies: HostCopies
    ) -> tuple[PendingAccepted, Tensor]:
        """See `StepBody`."""
        num_seqs = inputs.num_seqs
        accepted = AcceptedTokens(
            token_ids=self._state.tokens[:num_seqs, : self._num_rows].clone(),
            counts=self._state.counts[:num_seqs].clone(),
        )
        requests = [place for place, wanted in enumerate(inputs.num_logprobs) if wanted >= 0]
        each = range(self._num_rows)
        logprobs = launch_row_logprobs(
            self._logits_of,
            accepted.token_ids.flatten(),
            [place * self._num_rows + row for place in requests for row in each],
            [inputs.num_logprobs[place] for place in requests for _ in each],
            copies,
        )
        sample = PendingAccepted.start(
            accepted, self._state.num_verified[:num_seqs], requests, logprobs, copies
        )
        return sample, copies.add(self._state.is_usable[:num_seqs].clone())

    def _logits_of(self, rows: Tensor) -> Tensor:
        logits = self._model.compute_logits(self._state.hidden.index_select(0, rows))
        return logits[:, : self._sampler.vocab_size]

    def _sequences(self, bucket: int) -> DraftedSequences:
        """Return the sequences of the step that is loaded; where steps are called, made once."""
        load = self._static.num_loads, bucket
        if self._loaded is not None and self._loaded.load == load:
            return self._loaded.sequences
        sequences = self._static.drafted(bucket, self.drafts_SK[:, : self._num_rows - 1])
        if self._is_called:
            self._loaded = _Loaded(load, sequences)
        return sequences

    def _sampling_rows(self, bucket: int) -> SamplingRows:
        """Return what the sampler is told of the first row of each sequence."""
        return self._static.sampling_rows(bucket, ahead=self._sequences(bucket).num_ahead_B)
