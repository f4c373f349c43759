"""Short steps of prefill with fixed shapes: captured once per number of tokens, then replayed.

A few new tokens behind a long cached prefix keep the host that launches every kernel of every layer
busy for longer than the device computes. The key idea: such a step looks the same for whatever
sequences its tokens belong to, if attention is absorbed and reads pages (`segments`), so that a
graph of the whole model can be replayed for it, padded to the next larger number of tokens.

`SuffixGraphs` captures and replays; `ShortSteps` is the model of a runner that takes them where it
can, so nobody who makes steps knows. Called on the thread that launches steps; ranks that share
heads make the same steps and so replay the same graphs. On a CPU, or with `use_graphs=False`, the
same work is called instead of replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engine.attention.attention_rule import AttentionRule
from engine.batch import ForwardBatch
from engine.graphs.buckets import bucket_for
from engine.graphs.capture import (
    Capture,
    CaptureProgress,
    Eager,
    Replayable,
    capture_each,
    capture_or_close,
)
from engine.graphs.segments import SegmentShape, queries_of_a_segment
from engine.graphs.suffix_inputs import SuffixInputs
from engine.memory.kv_pool import KVPool
from engine.model.spec import ServedModel
from engine.operations import do_nothing
from engine.parallel.groups import RankGroup
from engine.request import num_blocks_for
from engine.runner import CausalModel, LayerDone, ModelRunner
from engine.streams import Streams

logger = logging.getLogger(__name__)

SUFFIX_BUCKETS: Final = (16, 32, 64, 128, 256)
"""Tokens of the steps that are captured: with more, the device is busy for longer than the host."""


def suffix_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture, ascending, where steps have at most so many."""
    most = min(max_num_batched_tokens, SUFFIX_BUCKETS[-1])
    return (*(size for size in SUFFIX_BUCKETS if size < most), most)


def why_no_suffixes(model: ServedModel) -> str:
    """Return why short steps of a model are not captured, or nothing.

    What only the device tells is not known here: see `capture_errors`.
    """
    if model.attention_rule is None:
        return "attention to heads reads the lengths of a step on the host"
    if model.groups.dims.dp > 1:
        return "ranks have prompts of their own, and steps of different sizes"
    if model.waits_for_counts:
        return "tokens travel to experts in a way that needs counts on the host"
    return ""


class SuffixGraphs:
    """The short steps of one rank's model and KV pool.

    Attributes:
        buckets: numbers of tokens, ascending.
    """

    def __init__(
        self,
        model: CausalModel,
        kv_pool: KVPool,
        rule: AttentionRule,
        *,
        buckets: Sequence[int],
        max_num_seqs: int,
        max_model_len: int,
        use_graphs: bool | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Allocate the static buffers; `capture` does the rest.

        Args:
            model: on the device of `kv_pool`.
            kv_pool: never moves afterwards.
            rule: of the model's attention.
            buckets: numbers of tokens, ascending.
            max_num_seqs: most sequences of a step.
            max_model_len: most tokens of a sequence.
            use_graphs: None for graphs on a CUDA device and none elsewhere.
            streams: of the rank; None for some of these steps' own.
        """
        device = kv_pool.device
        self._model, self._kv_pool, self._rule = model, kv_pool, rule
        self._use_graphs = device.type == "cuda" if use_graphs is None else use_graphs
        self._streams = streams or Streams(device)
        self.buckets = tuple(buckets)
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        shape = SegmentShape(
            num_tokens=self.buckets[-1],
            num_seqs=max_num_seqs,
            num_queries=queries_of_a_segment(rule.heads),
        )
        self._static = SuffixInputs(
            shape,
            num_blocks_for(max_model_len, kv_pool.block_size),
            block_size=kv_pool.block_size,
            device=device,
        )
        self._hidden = torch.empty(0, device=device)  # [T, D] of the largest, from `capture` on
        self._forwards: dict[int, Replayable] = {}

    @property
    def is_captured(self) -> bool:
        """Whether steps can be run."""
        return len(self._forwards) == len(self.buckets)

    @torch.inference_mode()
    def capture(
        self, progress: CaptureProgress | None = None, *, group: RankGroup | None = None
    ) -> None:
        """Warm up and capture every size, the largest first.

        Every rank that shares the model has to call it at the same time: steps are run, with
        padding only, and what they write goes into the dummy block. Weights that are made at first
        use must have been made.

        Args:
            progress: told how many graphs are done.
            group: these ranks, for host memory, to agree on each size; None for a rank alone.

        Raises:
            CaptureError: the model of a rank cannot be captured, which all of them say.
            RuntimeError: of this rank's device.
            PeerLostError: another rank ended.
        """
        assert not self._forwards
        make = Capture(self._streams).graph if self._use_graphs else Eager
        total = len(self.buckets)
        for bucket in capture_each(self.buckets, partial(self._capture_size, make=make), group):
            logger.debug("captured a short step num_tokens=%d", bucket)
            if progress is not None:
                progress(len(self._forwards), total)

    def close(self) -> None:
        """Forget what was captured; no step may follow.

        To be called before the groups end: NCCL waits for the last graph with its kernels in it.
        """
        for captured in self._forwards.values():
            captured.reset()
        self._forwards.clear()

    def takes(self, batch: ForwardBatch) -> bool:
        """Return whether a step can run here: the same on all ranks that run it."""
        if not batch.lengths or batch.num_rows is not None:
            return False
        if batch.num_tokens > self.buckets[-1] or batch.num_seqs > self._max_num_seqs:
            return False
        takes = self._rule.takes_absorbed
        return all(
            takes(queries, positions) and positions <= self._max_model_len
            for queries, positions in batch.lengths
        )

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Tensor:
        """Copy a step in that `takes` says yes to, and replay it; the host does not wait.

        Returns:
            [T, D] hidden states after the final norm, which the next step overwrites.
        """
        assert self.is_captured
        bucket = bucket_for(batch.num_tokens, self.buckets)
        self._static.load(batch, bucket)
        self._forwards[bucket].replay()
        return self._hidden[: batch.num_tokens]

    def _capture_size(self, bucket: int, make: Callable[[Callable[[], None]], Replayable]) -> None:
        self._static.clear(bucket)
        if not self._forwards:  # the largest one
            hidden = self._model.forward(self._static.batch(bucket), self._kv_pool)
            self._hidden = torch.empty_like(hidden)
        self._forwards[bucket] = make(partial(self._run_model, bucket))

    def _run_model(self, bucket: int) -> None:
        hidden = self._model.forward(self._static.batch(bucket), self._kv_pool)
        self._hidden[:bucket].copy_(hidden)


class ShortSteps:
    """A model whose short steps are replayed: a `CausalModel`, with one KV pool."""

    def __init__(self, model: CausalModel, graphs: SuffixGraphs, num_layers: int) -> None:
        """Take a model of so many layers, and its captured short steps."""
        assert graphs.is_captured
        self._model, self._graphs, self._num_layers = model, graphs, num_layers

    def forward(
        self,
        batch: ForwardBatch,
        kv_pool: KVPool,
        *,
        on_layer_done: LayerDone | None = None,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> Tensor:
        """See `CausalModel`; of a replayed step all layers are done at once."""
        if not self._graphs.takes(batch):
            return self._model.forward(
                batch, kv_pool, on_layer_done=on_layer_done, meanwhile=meanwhile
            )
        hidden = self._graphs.run(batch)
        if on_layer_done is not None:
            for index in range(self._num_layers):
                on_layer_done(index)
        meanwhile()
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `CausalModel`."""
        return self._model.compute_logits(hidden)


def capture_suffixes(
    runner: ModelRunner,
    model: ServedModel,
    *,
    buckets: Sequence[int],
    max_num_seqs: int,
    max_model_len: int,
    group: RankGroup | None = None,
    progress: CaptureProgress | None = None,
    use_graphs: bool | None = None,
    streams: Streams | None = None,
) -> tuple[ModelRunner, Callable[[], None]]:
    """Return a runner that replays short steps, and what forgets them again; all ranks call.

    Args:
        runner: of the model.
        model: that `why_no_suffixes` says nothing against.
        buckets: numbers of tokens, ascending.
        max_num_seqs: most requests of a step.
        max_model_len: most tokens of a request.
        group: of these ranks, for host memory; None for a rank alone.
        progress: told how many graphs are done.
        use_graphs: as in `SuffixGraphs`.
        streams: as in `SuffixGraphs`.

    Raises:
        CaptureError: the model of a rank cannot be captured, which all of them say; the runner
            still works.
        RuntimeError: of this rank's device.
        PeerLostError: another rank ended.
    """
    assert model.attention_rule is not None
    graphs = SuffixGraphs(
        model,
        runner.kv_pool,
        model.attention_rule,
        buckets=buckets,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        use_graphs=use_graphs,
        streams=streams,
    )
    capture_or_close(graphs, progress, group)
    logger.info("captured short steps num_tokens=%s", graphs.buckets)
    short = ShortSteps(model, graphs, model.config.num_hidden_layers)
    following = ModelRunner(
        short, runner.kv_pool, runner.sampler, in_group=runner.in_group, drafts=runner.drafts
    )
    return following, graphs.close
