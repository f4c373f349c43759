"""A whole decode step with fixed shapes: captured once per batch size, replayed every step.

The step is two graphs, one behind the other: the model, from token ids to final hidden states, and
the head with the sampler, of which there is one for greedy batches and one for all others; with
drafts (`drafting_body`) a third one makes the next step's. What they do, says a `StepBody`. Between
copying the inputs in and copying the tokens out the host only issues two replays, so it can issue
the next step while this one runs: the tokens of this step need not come by the host.

A batch is padded to the next larger size. Padding costs next to nothing, because few rows are
bound by the reading of weights; it goes to no expert, so no other rank ever has more to do for it.
Ranks that share experts may therefore run different sizes, also one of them none of its own: every
dispatcher of decode takes that (`engine.parallel`).

On a CPU, or with `use_graphs=False`, the same work is called instead of replayed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from engine.batch import StepBounds
from engine.constraint.step_masks import mask_of_step
from engine.device_span import DeviceSpan
from engine.graphs.buckets import batch_buckets, bucket_for
from engine.graphs.capture import Capture, CaptureProgress, Eager, Replayable, capture_each
from engine.graphs.drafting_body import DraftingBody
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
        num_drafts: int = 0,
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
            num_drafts: that a step verifies and makes for each sequence; above 0 of a model with
                its layer for multi-token prediction, and over a pool with that one's KV.
            streams: of the rank; None for some of these steps' own.
        """
        device = kv_pool.device
        self._model, self._kv_pool = model, kv_pool
        self._use_graphs = device.type == "cuda" if use_graphs is None else use_graphs
        self._streams = streams or Streams(device)
        self.buckets = tuple(buckets or batch_buckets(max_num_seqs))
        max_num_blocks = num_blocks_for(max_model_len, kv_pool.block_size)
        self._sampler = GraphSampler(vocab_size, max_num_seqs, device)
        bounds = StepBounds(num_blocks=kv_pool.num_blocks, vocab_size=vocab_size)
        room = KVRoom(block_size=kv_pool.block_size, max_model_len=max_model_len)
        self._slots = Slots(
            self._sampler, max_num_blocks, bounds, room=room if num_drafts else None
        )
        self._static = StaticInputs(
            max_num_seqs,
            max_num_blocks,
            block_size=kv_pool.block_size,
            vocab_size=vocab_size,
            device=device,
        )
        self._body = _body(model, kv_pool, self._static, self._sampler, num_drafts)
        self._forwards: dict[int, Replayable] = {}
        self._heads: dict[tuple[int, SamplingStage], Replayable] = {}
        self._drafts: dict[tuple[int, SamplingStage], Replayable] = {}

    @property
    def is_captured(self) -> bool:
        """Whether steps can be launched."""
        return bool(self._heads)

    @property
    def kept_drafts(self) -> Tensor | None:
        """Drafts of the next step, [slots, K] int64 on the device; a measurement may lose some."""
        return self._body.drafts_SK

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
        graphs_of_a_stage = 2 if self._body.has_drafts else 1
        total = len(self.buckets) * (1 + graphs_of_a_stage * len(SamplingStage))
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

    def join_drafts(self, group_mean: int = 0) -> None:
        """Make drafts for nobody, behind a step that was run without the graphs.

        The other ranks of the group make theirs, which takes as many collectives.
        """
        if not self._body.has_drafts:
            return
        with torch.inference_mode():
            inputs = self._slots.inputs(())
            bucket = bucket_for(group_mean, self.buckets)
            self._static.load(inputs, bucket)
            self._drafts[bucket, inputs.stage].replay()

    def forget(self) -> None:
        """Say that a step was run without the graphs: its tokens are not in their tables."""
        self._slots.clear()

    def launch_step(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: PendingStep | None = None,
        group_mean: int = 0,
    ) -> PendingStep:
        """Issue a step that `takes` says yes to, as `ModelRunner.launch` does.

        Args:
            scheduled: none for a rank that only joins the others' collectives.
            after: the step that samples the tokens that the host does not know yet.
            group_mean: sequences of a rank of the group in this step on average, rounded up. This
                rank's experts get their share of all of these, however few are its own, and
                products choose their tiles by the size of the step; so it is at least as large.

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
            return self._launch(scheduled, inputs, group_mean, after)

    def _launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        inputs: DecodeInputs,
        group_mean: int,
        after: PendingStep | None,
    ) -> PendingStep:
        """Copy a step's inputs in, replay it, and start to copy its tokens out.

        Where a constraint binds a row the head is launched, not replayed, once the tokens of the
        step before are read; the device has this step's model to run meanwhile.
        """
        assert self.is_captured
        bucket = bucket_for(max(inputs.num_seqs, group_mean), self.buckets)
        self._static.load(inputs, bucket)
        span = DeviceSpan.start(self._kv_pool.device)
        self._forwards[bucket].replay()
        try:
            self._run_head(scheduled, inputs, bucket, after)
        finally:
            # Also where that failed: the other ranks of the group make drafts together.
            if self._body.has_drafts:
                self._drafts[bucket, inputs.stage].replay()
        pending = self._launch_results(scheduled, inputs)
        if span is not None:
            span.end()
        return replace(pending, span=span)

    def _run_head(
        self,
        scheduled: Sequence[ScheduledRequest],
        inputs: DecodeInputs,
        bucket: int,
        after: PendingStep | None,
    ) -> None:
        """Replay the head, or where a mask binds rows launch it."""
        with may_fail(self._kv_pool.device, has_joined=True):
            mask = mask_of_step(
                scheduled, self._sampler.vocab_size, reader_of(after), self._kv_pool.device
            )
        if mask is None:
            self._heads[bucket, inputs.stage].replay()
            return
        with may_fail(self._kv_pool.device, has_joined=True):
            self._body.run_head(bucket, inputs.stage, mask)

    def _launch_results(
        self, scheduled: Sequence[ScheduledRequest], inputs: DecodeInputs
    ) -> PendingStep:
        """Start to copy the step's tokens out."""
        with may_fail(self._kv_pool.device, has_joined=True):
            copies = HostCopies(self._kv_pool.device)
            sample, is_usable = self._body.launch_sample(inputs, copies)
            copies.close()
        return PendingStep(
            scheduled=scheduled,
            sample=sample,
            is_usable=is_usable,
            prompts=[()] * len(scheduled),
            copies=copies,
        )

    def _capture_size(self, bucket: int, make: Callable[[Callable[[], None]], Replayable]) -> None:
        if not self._forwards:  # the largest one
            self._body.prepare(bucket)
        self._forwards[bucket] = make(partial(self._body.run_model, bucket))
        for stage in SamplingStage:
            self._heads[bucket, stage] = make(partial(self._body.run_head, bucket, stage))
            if self._body.has_drafts:
                self._drafts[bucket, stage] = make(partial(self._body.run_drafts, bucket, stage))


def _body(
    model: CausalModel,
    kv_pool: KVPool,
    static: StaticInputs,
    sampler: GraphSampler,
    num_drafts: int,
) -> StepBody:
    if not num_drafts:
        return TokenBody(model, kv_pool, static, sampler)
    assert kv_pool.num_mtp_layers, "drafts, and no KV of the layer that makes them"
    drafting = cast(DraftingModel, model)  # the layer is there where its KV is
    return DraftingBody(drafting, kv_pool, static, sampler, num_drafts=num_drafts)
