"""A whole decode step with fixed shapes: captured once per batch size, replayed every step.

The step is two graphs, one behind the other: the model, from token ids to final hidden states, and
the head with the sampler, of which there is one for greedy batches and one for all others. Between
copying the inputs in and copying the tokens out the host only issues two replays, so it can issue
the next step while this one runs: the tokens of this step need not come by the host.

A batch is padded to the next larger size. Padding costs next to nothing, because few rows are
bound by the reading of weights; it goes to no expert, so no other rank ever has more to do for it.
Ranks that share experts may therefore run different sizes, also one of them none of its own: every
dispatcher of decode takes that (`engine.parallel`).

On a CPU, or with `use_graphs=False`, the same work is called instead of replayed.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.batch import StepBounds
from engine.constraint.step_masks import mask_of_step
from engine.device_span import DeviceSpan
from engine.graphs.buckets import batch_buckets, bucket_for
from engine.graphs.capture import Capture, CaptureProgress, Eager, Replayable, capture_each
from engine.graphs.inputs import DecodeInputs, StaticInputs
from engine.graphs.slots import Slots
from engine.host_copy import HostCopies, upload
from engine.memory.kv_pool import KVPool
from engine.parallel.groups import RankGroup
from engine.pending_step import PendingStep, reader_of
from engine.request import ScheduledRequest, num_blocks_for
from engine.runner import CausalModel
from engine.sampling.graph_sampler import GraphSampler, SamplingStage
from engine.sampling.logprobs import PendingLogprobs, launch_logprobs
from engine.sampling.sampler import PendingSample
from engine.sampling.token_mask import TokenMask, mask_tokens
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
        self._slots = Slots(self._sampler, max_num_blocks, bounds)
        self._static = StaticInputs(
            max_num_seqs,
            max_num_blocks,
            block_size=kv_pool.block_size,
            vocab_size=vocab_size,
            device=device,
        )
        self._hidden = torch.empty(0, device=device)  # [max_num_seqs, D] from `capture` on
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._is_usable = torch.zeros(max_num_seqs, dtype=torch.bool, device=device)
        self._forwards: dict[int, Replayable] = {}
        self._heads: dict[tuple[int, SamplingStage], Replayable] = {}

    @property
    def is_captured(self) -> bool:
        """Whether steps can be launched."""
        return bool(self._heads)

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
        total = len(self.buckets) * (1 + len(SamplingStage))
        for _ in capture_each(self.buckets, partial(self._capture_size, make=make), group):
            if progress is not None:
                progress(len(self._forwards) + len(self._heads), total)

    def close(self) -> None:
        """Forget what was captured; no step may follow.

        To be called before the groups end: NCCL waits for the last graph with its kernels in it.
        """
        for captured in (*self._forwards.values(), *self._heads.values()):
            captured.reset()
        self._forwards.clear()
        self._heads.clear()

    def takes(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Return whether a step can run here; if not, it runs eagerly, in the runner."""
        return len(scheduled) <= self.buckets[-1] and all(
            item.num_scheduled_tokens == 1
            and item.samples
            and not item.num_prompt_logprob_rows
            and self._sampler.takes(item.request.sampling)
            for item in scheduled
        )

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
        num_seqs = inputs.num_seqs
        bucket = bucket_for(max(num_seqs, group_mean), self.buckets)
        self._static.load(inputs, bucket)
        span = DeviceSpan.start(self._kv_pool.device)
        self._forwards[bucket].replay()
        with may_fail(self._kv_pool.device, has_joined=True):
            mask = mask_of_step(
                scheduled, self._sampler.vocab_size, reader_of(after), self._kv_pool.device
            )
        if mask is None:
            self._heads[bucket, inputs.stage].replay()
        with may_fail(self._kv_pool.device, has_joined=True):
            if mask is not None:
                self._run_head(bucket, inputs.stage, mask)
            # Copies, because the next step overwrites the buffers, maybe before these are read.
            tokens, is_usable = self._tokens[:num_seqs].clone(), self._is_usable[:num_seqs].clone()
            copies = HostCopies(self._kv_pool.device)
            rows = [row for row, wanted in enumerate(inputs.num_logprobs) if wanted >= 0]
            sample = PendingSample(
                token_ids=tokens,
                host_ids=copies.add(tokens),
                logprob_rows=rows,
                logprobs=self._launch_logprobs(tokens, rows, inputs.num_logprobs, copies),
            )
            usable_on_host = copies.add(is_usable)
            copies.close()
            if span is not None:
                span.end()
        return PendingStep(
            scheduled=scheduled,
            sample=sample,
            is_usable=usable_on_host,
            prompts=[()] * len(scheduled),
            copies=copies,
            span=span,
        )

    def _launch_logprobs(
        self, tokens: Tensor, rows: Sequence[int], num_top: Sequence[int], copies: HostCopies
    ) -> PendingLogprobs | None:
        """Compute the logits of the rows again: the graphs keep none, and few ask for them."""
        if not rows:
            return None
        (index,) = upload([np.array(rows, dtype=np.int64)], tokens.device)
        logits = self._model.compute_logits(self._hidden.index_select(0, index))
        raw = logits[:, : self._sampler.vocab_size]
        wanted = [num_top[row] for row in rows]
        return launch_logprobs(raw, tokens.index_select(0, index), wanted, copies)

    def _capture_size(self, bucket: int, make: Callable[[Callable[[], None]], Replayable]) -> None:
        if not self._forwards:  # the largest one
            hidden = self._model.forward(self._static.batch(bucket), self._kv_pool)
            self._hidden = torch.empty_like(hidden)
        self._forwards[bucket] = make(partial(self._run_model, bucket))
        for stage in SamplingStage:
            self._heads[bucket, stage] = make(partial(self._run_head, bucket, stage))

    def _run_model(self, bucket: int) -> None:
        hidden = self._model.forward(self._static.batch(bucket), self._kv_pool)
        self._hidden[:bucket].copy_(hidden)

    def _run_head(self, bucket: int, stage: SamplingStage, mask: TokenMask | None = None) -> None:
        logits = self._model.compute_logits(self._hidden[:bucket])
        # A sum is finite only if every term is, and reads the logits once.
        self._is_usable[:bucket].copy_(torch.isfinite(logits.sum(dim=-1)))
        if mask is not None:
            mask_tokens(logits[:, : self._sampler.vocab_size], mask)
        rows = self._static.sampling_rows(bucket)
        self._tokens[:bucket].copy_(self._sampler.choose(logits, rows, stage))
