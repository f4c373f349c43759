"""A whole decode step with fixed shapes: captured once per batch size, replayed every step.

The step is two graphs, one behind the other: the model, from token ids to final hidden states, and
the head with the sampler, of which there is one for greedy batches and one for all others; with
drafts (`drafting_body`) a third one makes the next step's. What they do, says a `StepBody`. Where
the number of drafts is chosen anew before every step, there is one of each for every number.
Between copying the inputs in and copying the tokens out the host only issues replays, so it can
issue the next step while this one runs: the tokens of this step need not come by the host.

A batch is padded to the next larger size. Padding costs next to nothing, because few rows are
bound by the reading of weights; it goes to no expert, so no other rank ever has more to do for it.
Ranks that share experts may therefore run different sizes, also one of them none of its own: every
dispatcher of decode takes that (`engine.parallel`).

On a CPU, or with `use_graphs=False`, the same work is called instead of replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.batch import StepBounds
from engine.device_span import DeviceSpan
from engine.draft_choices import DraftChoices
from engine.graphs.buckets import batch_buckets, bucket_for
from engine.graphs.capture import Capture, CaptureProgress, Eager, Replayable, capture_each
from engine.graphs.drafting_body import DraftingBody, DraftState
from engine.graphs.host_drafts import HostDrafts
from engine.graphs.inputs import DecodeInputs, StaticInputs
from engine.graphs.slots import KVRoom, Slots
from engine.graphs.step_body import StepBody, TokenBody
from engine.host_copy import HostCopies
from engine.memory.kv_pool import KVPool
from engine.model.spec import DraftingModel
from engine.parallel.groups import RankGroup
from engine.pending_step import PendingStep, reader_of
from engine.request import ScheduledRequest, num_blocks_for
from engine.runner import CausalModel
from engine.sampling.graph_sampler import GraphSampler, SamplingStage
from engine.sampling.step_masks import StepDrafts, mask_of_step
from engine.step_error import StepError, may_fail
from engine.streams import Streams


class StepGraphs:
    """The decode steps of one rank's model and KV pool."""

    def __init__(
        self,
        model: CausalModel,
        kv_pool: KVPool,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        buckets: Sequence[int] | None = None,
        use_graphs: bool | None = None,
        num_drafts: int | DraftChoices = 0,
        streams: Streams | None = None,
    ) -> None:
        """Allocate the static buffers; `capture` does the rest.

        Args:
            model: on the device of `kv_pool`.
            kv_pool: never moves afterwards.
            vocab_size: of the model; logits beyond it are padding.
            max_num_seqs: most sequences of a step.
            max_model_len: most tokens of a sequence.
            buckets: batch sizes to capture, ascending; None for `batch_buckets`.
            use_graphs: None for graphs on a CUDA device and none elsewhere.
            num_drafts: that a step verifies and makes for each sequence, or which numbers there are
                to choose from; above 0 of a model with its layer for multi-token prediction, and
                over a pool with that one's KV.
            streams: of the rank; None for some of these steps' own.
        """
        device = kv_pool.device
        self._kv_pool = kv_pool
        self._use_graphs = device.type == "cuda" if use_graphs is None else use_graphs
        self._streams = streams or Streams(device)
        self.buckets = tuple(buckets or batch_buckets(max_num_seqs))
        max_num_blocks = num_blocks_for(max_model_len, kv_pool.block_size)
        self._sampler = GraphSampler(vocab_size, max_num_seqs, device)
        bounds = StepBounds(num_blocks=kv_pool.num_blocks, vocab_size=vocab_size)
        room = KVRoom(block_size=kv_pool.block_size, max_model_len=max_model_len)
        self.choices = _choices(num_drafts)
        self._slots = Slots(
            self._sampler, max_num_blocks, bounds, room=room if self.choices.most else None
        )
        self._static = StaticInputs(
            max_num_seqs,
            max_num_blocks,
            block_size=kv_pool.block_size,
            vocab_size=vocab_size,
            device=device,
        )
        self._bodies = _bodies(model, kv_pool, self._static, self._sampler, self.choices)
        self._host_drafts = HostDrafts()
        self._forwards: dict[_Size, Replayable] = {}
        self._heads: dict[tuple[_Size, SamplingStage], Replayable] = {}
        self._drafts: dict[tuple[_Size, SamplingStage], Replayable] = {}

    @property
    def is_captured(self) -> bool:
        """Whether steps can be launched."""
        return bool(self._heads)

    @property
    def are_replayed(self) -> bool:
        """Whether they are graphs, and not called one kernel at a time."""
        return self._use_graphs

    @property
    def kept_drafts(self) -> Tensor | None:
        """Drafts of the next step, [slots, K] int64 on the device; a measurement may lose some."""
        return self._bodies[self.choices.most].drafts_SK

    @torch.inference_mode()
    def capture(
        self, progress: CaptureProgress | None = None, *, group: RankGroup | None = None
    ) -> None:
        """Warm up and capture every batch size, the largest first.

        Every rank that shares experts has to call it at the same time: steps are run, with padding
        only, and what they write goes into the dummy block. Weights that are made at first use
        must have been made.

        Args:
            progress: told how many graphs are done.
            group: these ranks, for host memory, to agree on each size; None for a rank alone.

        Raises:
            CaptureError: the model of a rank cannot be captured, which all of them say.
            RuntimeError: of this rank's device.
            PeerLostError: another rank ended.
        """
        assert not self.is_captured
        make = Capture(self._streams).graph if self._use_graphs else Eager
        graphs_of_a_stage = 2 if self.choices.most else 1
        num_sizes = sum(len(self.choices.of(bucket)) for bucket in self.buckets)
        total = num_sizes * (1 + graphs_of_a_stage * len(SamplingStage))
        for _ in capture_each(self.buckets, partial(self._capture_size, make=make), group):
            if progress is not None:
                done = len(self._forwards) + len(self._heads) + len(self._drafts)
                progress(done, total)

    def close(self) -> None:
        """Forget what was captured; no step may follow.

        To be called before the groups end: NCCL waits for the last graph with its kernels in it.
        """
        for captured in (self._forwards, self._heads, self._drafts):
            for graph in captured.values():
                graph.reset()
            captured.clear()

    def takes(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Return whether a step can run here; if not, it runs eagerly, in the runner."""
        return len(scheduled) <= self.buckets[-1] and all(
            item.num_scheduled_tokens == 1
            and item.samples
            and not item.num_prompt_logprob_rows
            and self._sampler.takes(item.request.sampling)
            for item in scheduled
        )

    def join_drafts(self, group_mean: int = 0, num_drafts: int | None = None) -> None:
        """Make drafts for nobody, behind a step that was run without the graphs.

        The other ranks of the group make theirs, which takes as many collectives.

        Args:
            group_mean: see `launch_step`.
            num_drafts: the same.
        """
        size = self._size(group_mean, num_drafts)
        if not size.num_drafts:
            return
        with torch.inference_mode():
            inputs = self._slots.inputs(())
            self._static.load(inputs, size.bucket)
            self._drafts[size, inputs.stage].replay()

    def replay(self, inputs: DecodeInputs, num_drafts: int) -> None:
        """Replay a step that is nobody's, of exactly a captured size; nothing is read of it."""
        size = _Size(inputs.num_seqs, num_drafts)
        with torch.inference_mode():
            self._static.load(inputs, size.bucket)
            self._forwards[size].replay()
            self._heads[size, inputs.stage].replay()
            if (size, inputs.stage) in self._drafts:
                self._drafts[size, inputs.stage].replay()

    def forget(self) -> None:
        """Say that a step was run without the graphs: its tokens are not in their tables."""
        self._slots.clear()

    def launch_step(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: PendingStep | None = None,
        group_mean: int = 0,
        num_drafts: int | None = None,
    ) -> PendingStep:
        """Issue a step that `takes` says yes to, as `ModelRunner.launch` does.

        Args:
            scheduled: none for a rank that only joins the others' collectives.
            after: the step that samples the tokens that the host does not know yet.
            group_mean: sequences of a rank of the group in this step on average, rounded up. This
                rank's experts get their share of all of these, however few are its own, and
                products choose their tiles by the size of the step; so it is at least as large.
            num_drafts: of every sequence, one of those that the size has; the same on all ranks.
                None for the most that it has. Fewer may be verified, if the step before has made
                fewer.

        Raises:
            StepError: before the replay, where a request may be at fault, or behind it. What fails
                in it is raised as it is: other ranks may be in the same step.
        """
        with torch.inference_mode():
            try:
                with may_fail(self._kv_pool.device, has_joined=False):
                    unread = None if after is None else after.unread()
                    inputs = self._slots.inputs(scheduled, unread)
            except StepError:
                self._slots.clear()  # they know a part of a step that will not be
                raise
            size = self._size(max(inputs.num_seqs, group_mean), num_drafts)
            return self._launch(scheduled, inputs, size, after)

    def _launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        inputs: DecodeInputs,
        size: _Size,
        after: PendingStep | None,
    ) -> PendingStep:
        """Copy a step's inputs in, replay it, and start to copy its tokens out.

        Where a constraint binds a row the head is launched, not replayed, once the tokens of the
        step before are read; the device has this step's model to run meanwhile.
        """
        assert self.is_captured
        device = self._kv_pool.device
        drafts = self._host_drafts.take(scheduled, inputs, size.num_drafts)
        self._static.load(inputs, size.bucket)
        span = DeviceSpan.start(device)
        self._forwards[size].replay()
        body = self._bodies[size.num_drafts]
        try:
            self._run_head(scheduled, inputs, size, after, drafts)
        finally:
            # Also where that failed: the other ranks of the group make drafts together.
            if body.has_drafts:
                self._drafts[size, inputs.stage].replay()
        pending = _launch_results(body, scheduled, inputs, self._host_drafts, device)
        if span is not None:
            span.end()
        return replace(pending, span=span)

    def _run_head(
        self,
        scheduled: Sequence[ScheduledRequest],
        inputs: DecodeInputs,
        size: _Size,
        after: PendingStep | None,
        drafts: StepDrafts,
    ) -> None:
        """Replay the head, or where a mask binds rows launch it."""
        with may_fail(self._kv_pool.device, has_joined=True):
            vocab_size, device = self._sampler.vocab_size, self._kv_pool.device
            mask = mask_of_step(scheduled, vocab_size, reader_of(after), device, drafts)
            self._slots.drop(item.request for item in scheduled if item.is_lost)
            if mask is not None:
                self._bodies[size.num_drafts].run_head(size.bucket, inputs.stage, mask)
                return
        self._heads[size, inputs.stage].replay()

    def _size(self, num_seqs: int, num_drafts: int | None) -> _Size:
        bucket = bucket_for(num_seqs, self.buckets)
        return _Size(bucket, self.choices.of(bucket)[-1] if num_drafts is None else num_drafts)

    def _capture_size(self, bucket: int, make: Callable[[Callable[[], None]], Replayable]) -> None:
        if not self._forwards:
            most = _most_rows(self.choices, self.buckets)
            self._bodies[most.num_drafts].prepare(most.bucket)
        for num_drafts in reversed(self.choices.of(bucket)):
            size, body = _Size(bucket, num_drafts), self._bodies[num_drafts]
            self._forwards[size] = make(partial(body.run_model, bucket))
            for stage in SamplingStage:
                self._heads[size, stage] = make(partial(body.run_head, bucket, stage))
                if body.has_drafts:
                    self._drafts[size, stage] = make(partial(body.run_drafts, bucket, stage))


def _launch_results(
    body: StepBody,
    scheduled: Sequence[ScheduledRequest],
    inputs: DecodeInputs,
    host_drafts: HostDrafts,
    device: torch.device,
) -> PendingStep:
    """Start to copy the step's tokens out."""
    with may_fail(device, has_joined=True):
        copies = HostCopies(device)
        sample, is_usable = body.launch_sample(inputs, copies)
        host_drafts.keep(scheduled, inputs, body.drafts_SK, copies)
        copies.close()
    return PendingStep(
        scheduled=scheduled,
        sample=sample,
        is_usable=is_usable,
        prompts=[()] * len(scheduled),
        copies=copies,
    )


class _Size(NamedTuple):
    """Of a step: how many sequences, padding included, and the drafts of each."""

    bucket: int
    num_drafts: int


def _most_rows(choices: DraftChoices, buckets: Sequence[int]) -> _Size:
    """Return the step of the most rows, which need not be that of the most sequences."""
    sizes = [_Size(bucket, choices.of(bucket)[-1]) for bucket in buckets]
    return max(sizes, key=lambda size: size.bucket * (1 + size.num_drafts))


def _choices(num_drafts: int | DraftChoices) -> DraftChoices:
    return DraftChoices.always(num_drafts) if isinstance(num_drafts, int) else num_drafts


def _bodies(
    model: CausalModel,
    kv_pool: KVPool,
    static: StaticInputs,
    sampler: GraphSampler,
    choices: DraftChoices,
) -> dict[int, StepBody]:
    """Return what steps do by their number of drafts; steps of several share one state."""
    if not choices.most:
        return {0: TokenBody(model, kv_pool, static, sampler)}
    assert kv_pool.num_mtp_layers, "drafts, and no KV of the layer that makes them"
    drafting = cast(DraftingModel, model)  # the layer is there where its KV is
    state = DraftState(static, sampler, max_drafts=choices.most, device=kv_pool.device)
    return {
        count: DraftingBody(drafting, kv_pool, static, sampler, num_drafts=count, state=state)
        for count in choices.numbers
    }
