"""Runs one step on this rank's device: plan in, tokens out.

The runner knows tensors and never queues: it builds the batch, runs the model, computes logits at
the rows that need them and samples. `launch` issues all of that and reads nothing back, `collect`
waits and reads; between the two another step can be launched. Where tokens travel to experts in a
way that needs counts on the host (`TokenDispatcher.waits_for_counts`), launching takes as long as
the step, and nobody should run ahead of it. The runner does not change requests; whoever scheduled
the step applies the results. Of a tensor-parallel group, rank 0 calls `launch` and the
others `forward_only` with the same batch: rank 0 alone computes logits, which needs no collective.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from engine.batch import ForwardBatch, StepBounds, build_forward_batch, sampled_rows
from engine.device_span import DeviceSpan
from engine.host_copy import HostCopies, upload
from engine.memory.kv_pool import KVPool
from engine.operations import do_nothing
from engine.pending_step import PendingStep, SampledFirst, StepResult, reader_of
from engine.request import ScheduledRequest
from engine.sampling.inputs import SamplingInput
from engine.sampling.logprobs import PendingLogprobs, launch_prompt_logprobs
from engine.sampling.sampler import PendingSample, Sampler
from engine.sampling.step_masks import mask_of_step
from engine.step_error import StepError, may_fail

MAX_LOGITS_ROWS = 256
"""Rows of logits that exist at a time: a 1024-token chunk with prompt logprobs over a vocabulary of
129280 would otherwise take half a gigabyte."""

LayerDone = Callable[[int], None]


class CausalModel(Protocol):
    """What the runner needs of a model."""

    def forward(
        self,
        batch: ForwardBatch,
        kv_pool: KVPool,
        *,
        on_layer_done: LayerDone | None = None,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> torch.Tensor:
        """Run all layers, write the KV, return final-normed hidden states [T, hidden].

        Calls `on_layer_done` with each layer's index, `meanwhile` now and then.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [L, vocab] float32 for hidden states [L, hidden]; no collective."""
        ...


class BehindSteps(Protocol):
    """What runs behind every step of a runner: the layer for multi-token prediction."""

    def run(
        self,
        scheduled: Sequence[ScheduledRequest],
        batch: ForwardBatch,
        hidden: torch.Tensor,
        sampled_ids: torch.Tensor | None,
        copies: HostCopies,
    ) -> torch.Tensor | None:
        """Issue it behind a step that this rank sampled in; the host does not wait.

        Args:
            scheduled: what ran.
            batch: of these.
            hidden: [T, D], what the model returned.
            sampled_ids: [L] int64, tokens of those that sample, in order; None if none does.
            copies: take the drafts to the host.

        Returns:
            [L] int64 on the host once the copies are there: drafts of the tokens after the sampled
            ones. None if there are none.

        Raises:
            StepError: no rank waits for this one any more.
        """
        ...

    def follow(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        """Take part behind a step that another rank of the group samples in, or nobody does."""
        ...


class ModelRunner:
    """One model with its KV pool and sampler.

    The host waits for the device in `PendingStep.collect` alone (and, while it launches, for counts
    where the module says so), so the next step can be launched while one runs. CUDA takes some
    thousand launches ahead; a longer step is launched as the device makes room, so what is to
    happen soon after the step before it ends has to happen `meanwhile`. Everything is issued to one
    stream: a later step sees the KV of an earlier one.
    """

    def __init__(
        self,
        model: CausalModel,
        kv_pool: KVPool,
        sampler: Sampler,
        *,
        in_group: bool = False,
        drafts: BehindSteps | None = None,
    ) -> None:
        """Take what runs.

        Args:
            model: with the KV pool and the sampler.
            kv_pool: of the model.
            sampler: of the model's vocabulary.
            in_group: whether the model's layers wait for other ranks.
            drafts: run behind every step, by all ranks; None for nothing.
        """
        self.model = model
        self.kv_pool = kv_pool
        self.sampler = sampler
        self.in_group = in_group
        self.drafts = drafts
        self._span: DeviceSpan | None = None  # of the latest step

    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        on_layer_done: LayerDone | None = None,
    ) -> list[StepResult]:
        """Run one step and wait for it: `launch` and `collect`."""
        return self.launch(scheduled, on_layer_done=on_layer_done).collect()

    @torch.inference_mode()
    def prepare(
        self, scheduled: Sequence[ScheduledRequest], *, after: PendingStep | None = None
    ) -> ForwardBatch:
        """Build the tensors of a step for `launch`, before anybody else hears of it.

        Args:
            scheduled: at least one; block tables must cover the scheduled tokens.
            after: the step that samples the tokens that the host does not know yet.

        Raises:
            StepError: they cannot be built. No rank waits for this one.
        """
        unread = after.unread() if after is not None else None
        bounds = StepBounds(num_blocks=self.kv_pool.num_blocks, vocab_size=self.sampler.vocab_size)
        device = self.kv_pool.device
        with may_fail(device, has_joined=False):
            return build_forward_batch(
                scheduled, self.kv_pool.block_size, device, unread=unread, bounds=bounds
            )

    @torch.inference_mode()
    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        batch: ForwardBatch | None = None,
        after: PendingStep | None = None,
        on_layer_done: LayerDone | None = None,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> PendingStep:
        """Issue one step to the device and return without waiting for it.

        The requests are read now and may change as soon as this returns.

        Args:
            scheduled: at least one; block tables must cover the scheduled tokens.
            batch: of these, if `prepare` has made it.
            after: the step that samples the tokens that the host does not know yet.
            on_layer_done: called with a layer's index once its KV of this step is issued.
            meanwhile: called several times a layer, between two operations. May do what follows
                from the ends of steps before this one; tokens and sampling of the requests of this
                step stay as they are.

        Raises:
            StepError: the step gives nothing. In a group not where a layer fails: the other ranks
                are in it, so that is raised as it is.
        """
        device = self.kv_pool.device
        if batch is None:
            batch = self.prepare(scheduled, after=after)
        # None until the step has an end: what fails has none.
        span_before, self._span = self._span, None
        span = DeviceSpan.start(device)
        copies = HostCopies(device)
        with nullcontext() if self.in_group else may_fail(device, has_joined=True):
            hidden = self.model.forward(
                batch, self.kv_pool, on_layer_done=on_layer_done, meanwhile=meanwhile
            )
        copies.nearly_there()
        try:
            with may_fail(device, has_joined=True):
                pending = self._finish(scheduled, batch, hidden, copies, meanwhile, after=after)
        except StepError:
            if self.drafts is not None:
                self.drafts.follow(batch, hidden)  # the others are there
            raise
        copies.close()
        if self.drafts is not None:
            pending = self._draft(self.drafts, batch, hidden, pending)
        if span is not None:
            span.end()
        self._span = span
        return replace(pending, span=span, span_before=span_before)

    @torch.inference_mode()
    def forward_only(self, batch: ForwardBatch, *, on_layer_done: LayerDone | None = None) -> None:
        """Take part in a step that another rank of the tensor-parallel group launches."""
        hidden = self.model.forward(batch, self.kv_pool, on_layer_done=on_layer_done)
        if self.drafts is not None:
            self.drafts.follow(batch, hidden)

    def run_dummy(self) -> DeviceSpan | None:
        """Launch one padding token, so that an idle expert-parallel rank joins the collectives.

        Returns:
            When the device runs it; None on a CPU.
        """
        device = self.kv_pool.device
        batch = ForwardBatch.dummy(device)
        self._span = DeviceSpan.start(device)
        self.forward_only(batch)
        if self._span is not None:
            self._span.end()
        return self._span

    def _draft(
        self, drafts: BehindSteps, batch: ForwardBatch, hidden: torch.Tensor, pending: PendingStep
    ) -> PendingStep:
        """Run the layer for multi-token prediction behind a step, and draft where it sampled."""
        sampled = None if pending.sample is None else pending.sample.token_ids
        copies = HostCopies(self.kv_pool.device)
        with nullcontext() if self.in_group else may_fail(self.kv_pool.device, has_joined=True):
            ids = drafts.run(pending.scheduled, batch, hidden, sampled, copies)
        copies.close()
        first = None if ids is None else SampledFirst(pending.copies)
        return replace(pending, copies=copies, drafts=ids, sampled_first=first)

    def _finish(
        self,
        scheduled: Sequence[ScheduledRequest],
        batch: ForwardBatch,
        hidden: torch.Tensor,
        copies: HostCopies,
        meanwhile: Callable[[], None],
        *,
        after: PendingStep | None,
    ) -> PendingStep:
        """Compute logits from final hidden states [T, hidden], and sample; no collective."""
        plan = _plan_rows(scheduled)
        prompts, logits = self._walk_logits(hidden[batch.logits_indices], plan, copies, meanwhile)
        sample = is_usable = None
        if logits is not None:
            # A sum is finite only if every term is, and reads the logits once.
            finite = torch.isfinite(logits.sum(dim=-1))
            is_usable = copies.add(finite)
            logits = torch.where(finite[:, None], logits, 0.0)  # the sampler knows numbers only
            sample = self._sample(logits, scheduled, batch, copies, after)
        return PendingStep(
            scheduled=scheduled, sample=sample, is_usable=is_usable, prompts=prompts, copies=copies
        )

    def _walk_logits(
        self,
        wanted: torch.Tensor,
        plan: "_RowPlan",
        copies: HostCopies,
        meanwhile: Callable[[], None],
    ) -> tuple[list[list[PendingLogprobs]], torch.Tensor | None]:
        """Compute logits slice by slice; keep prompt logprobs and the rows to sample from."""
        prompts: list[list[PendingLogprobs]] = [[] for _ in range(plan.num_requests)]
        kept: list[torch.Tensor] = []
        for start in range(0, len(wanted), MAX_LOGITS_ROWS):
            end = min(start + MAX_LOGITS_ROWS, len(wanted))
            logits = self.model.compute_logits(wanted[start:end])
            for run in plan.prompt_runs:
                first, last = max(run.start, start), min(run.end, end)
                if first < last:
                    next_ids = run.next_ids[first - run.start : last - run.start]
                    rows = logits[first - start : last - start, : self.sampler.vocab_size]
                    prompts[run.index].append(
                        launch_prompt_logprobs(rows, next_ids, run.num_top, copies)
                    )
            sample_rows = [row - start for row in plan.sample_rows if start <= row < end]
            if len(sample_rows) == end - start:
                kept.append(logits)
            elif sample_rows:
                kept.append(_select(logits, sample_rows))
            meanwhile()
        if not kept:
            return prompts, None
        return prompts, kept[0] if len(kept) == 1 else torch.cat(kept)

    def _sample(
        self,
        logits: torch.Tensor,
        scheduled: Sequence[ScheduledRequest],
        batch: ForwardBatch,
        copies: HostCopies,
        after: PendingStep | None,
    ) -> PendingSample:
        samplers = [item for item in scheduled if item.samples]
        inputs = [
            SamplingInput(
                item.request.sampling,
                item.request.prompt_token_ids,
                item.request.output_token_ids,
                item.num_unread,
            )
            for item in samplers
        ]
        unread_ids = None
        if any(item.num_unread for item in samplers):
            # The token that nobody has read is the one that the sampled row runs.
            unread_ids = _select(batch.input_ids, sampled_rows(scheduled))
        # Last: it may wait for the step before, when all of this one is issued but its sampling.
        mask = mask_of_step(samplers, self.sampler.vocab_size, reader_of(after), logits.device)
        return self.sampler.launch(logits, inputs, copies, unread_ids=unread_ids, mask=mask)


@dataclass(frozen=True, slots=True)
class _PromptRun:
    """Rows [start, end) of the wanted logits predict `next_ids` of the request at `index`."""

    index: int
    start: int
    end: int
    next_ids: list[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class _RowPlan:
    """What each row of the wanted logits is for; the order is that of `logits_rows`."""

    num_requests: int
    prompt_runs: list[_PromptRun]
    sample_rows: list[int]


def _plan_rows(scheduled: Sequence[ScheduledRequest]) -> _RowPlan:
    runs: list[_PromptRun] = []
    sample_rows: list[int] = []
    row = 0
    for index, item in enumerate(scheduled):
        count = item.num_prompt_logprob_rows
        if count:
            next_ids = item.request.prompt_token_ids[item.start + 1 : item.start + 1 + count]
            num_top = item.request.sampling.num_prompt_logprobs
            runs.append(_PromptRun(index, row, row + count, next_ids, num_top))
        row += count
        if item.samples:
            sample_rows.append(row)
            row += 1
    return _RowPlan(len(scheduled), runs, sample_rows)


def _select(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    (index,) = upload([np.array(rows, dtype=np.int64)], tensor.device)
    return tensor.index_select(0, index)
