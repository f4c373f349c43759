"""Steps of prefill with fixed shapes: captured once per number of tokens, then replayed.

A few thousand new tokens, or a few behind a long cached prefix, keep the host that launches every
kernel of every layer busy for longer than the device computes. The key idea: steps of a kind look
the same for whatever sequences their tokens belong to, so that a graph of the whole model can be
replayed for them, padded to the next larger number of tokens. What a kind is, and how it is padded,
say its static inputs (`ChunkInputs`): suffixes of few tokens attend in the absorbed form, to pages
(`SuffixInputs`), prompts in the decompressed one, to themselves and to some thousand cached tokens
(`PromptInputs`).

`ChunkGraphs` captures and replays; `ReplayedSteps` is the model of a runner that takes them where
it can, so nobody who makes steps knows. Called on the thread that launches steps; ranks that share
heads make the same steps and so replay the same graphs. On a CPU, or with `use_graphs=False`, the
same work is called instead of replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final, Protocol

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.graphs.buckets import bucket_for
from engine.graphs.capture import (
    CalledPieces,
    Capture,
    CaptureProgress,
    ReplayableInPieces,
    WorkInPieces,
    capture_each,
    capture_or_close,
)
from engine.graphs.prompt_inputs import PromptInputs
from engine.graphs.suffix_inputs import SuffixInputs
from engine.memory.kv_pool import KVPool
from engine.model.spec import ServedModel
from engine.operations import do_nothing
from engine.parallel.groups import RankGroup
from engine.runner import CausalModel, LayerDone, ModelRunner
from engine.streams import Streams

logger = logging.getLogger(__name__)

SUFFIX_SIZES: Final = (16, 32, 64, 128, 256)
"""Tokens of the steps of suffixes that are captured: with more, keys are expanded."""

PROMPT_SIZES: Final = tuple(range(512, 4096 + 1, 512))
"""Tokens of the further steps that are captured, of prompts: with more, the device is busy for
longer than the host."""

PROMPTS_CACHED: Final = (0, 8192)
"""Cached tokens of a captured step of prompts, at most. What is not there is expanded all the same:
by arithmetic 8,192 positions of 16 heads are some 50 us of a layer."""

MAX_PROMPTS: Final = 32
"""Of a captured step of prompts: each may end within a block, which is gathered whole."""

LAYERS_OF_A_PIECE: Final = 16
"""Of a step of prompts: their KV is sent while the layers behind them run."""


class ChunkInputs(Protocol):
    """The static inputs of one kind of steps, on the device, of several sizes.

    Attributes:
        sizes: numbers of tokens, ascending.
        is_in_pieces: whether steps take so long that their first layers' KV is sent before the
            last ones are through.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """See the class."""
        ...

    @property
    def is_in_pieces(self) -> bool:
        """See the class."""
        ...

    def takes(self, batch: ForwardBatch) -> bool:
        """Return whether a step is of this kind: the same on all ranks that run it."""
        ...

    def clear(self, size: int) -> None:
        """Let a step of `size` tokens be padding only."""
        ...

    def load(self, batch: ForwardBatch, size: int) -> None:
        """Copy a step in that `takes` says yes to, padded to `size` tokens."""
        ...

    def batch(self, size: int) -> ForwardBatch:
        """Return the tensors of a step of `size` tokens; reads nothing on the host."""
        ...


def chunk_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture, ascending, where steps have at most so many."""
    sizes = (*SUFFIX_SIZES, *PROMPT_SIZES)
    most = min(max_num_batched_tokens, sizes[-1])
    return (*(size for size in sizes if size < most), most)


def num_kinds(size: int) -> int:
    """Return in how many kinds a number of tokens is captured."""
    return len(PROMPTS_CACHED) + (size <= SUFFIX_SIZES[-1])


def why_no_chunks(model: ServedModel) -> str:
    """Return why steps of a model's prefill are not captured, or nothing.

    What only the device tells is not known here: see `capture_errors`.
    """
    if model.attention_rule is None:
        return "attention to heads reads the lengths of a step on the host"
    if model.groups.dims.dp > 1:
        return "ranks have prompts of their own, and steps of different sizes"
    if model.waits_for_counts:
        return "tokens travel to experts in a way that needs counts on the host"
    return ""


def chunk_kinds(
    model: ServedModel,
    kv_pool: KVPool,
    sizes: Sequence[int],
    *,
    max_num_seqs: int,
    max_model_len: int,
) -> tuple[ChunkInputs, ...]:
    """Allocate the static inputs of all kinds of steps that are captured.

    Args:
        model: that `why_no_chunks` says nothing against.
        kv_pool: of the model.
        sizes: numbers of tokens, ascending.
        max_num_seqs: most sequences of a step.
        max_model_len: most tokens of a sequence.
    """
    rule, block_size, device = model.attention_rule, kv_pool.block_size, kv_pool.device
    assert rule is not None
    prompts = [
        PromptInputs(
            rule,
            sizes,
            max_num_cached=num_cached,
            max_num_seqs=min(max_num_seqs, MAX_PROMPTS),
            block_size=block_size,
            device=device,
        )
        for num_cached in PROMPTS_CACHED
    ]
    short = [size for size in sizes if size <= SUFFIX_SIZES[-1]]
    if not short:
        return tuple(prompts)
    suffixes = SuffixInputs(
        rule,
        short,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        device=device,
    )
    return suffixes, *prompts


class ChunkGraphs:
    """The captured steps of one rank's model and KV pool.

    Attributes:
        sizes: numbers of tokens of all kinds, ascending.
    """

    def __init__(
        self,
        model: CausalModel,
        kv_pool: KVPool,
        kinds: Sequence[ChunkInputs],
        *,
        use_graphs: bool | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Take what runs; `capture` does the rest.

        Args:
            model: on the device of `kv_pool`.
            kv_pool: never moves afterwards.
            kinds: of steps; one that several take is the first one's.
            use_graphs: None for graphs on a CUDA device and none elsewhere.
            streams: of the rank; None for some of these steps' own.
        """
        device = kv_pool.device
        self._model, self._kv_pool, self._kinds = model, kv_pool, tuple(kinds)
        self._use_graphs = device.type == "cuda" if use_graphs is None else use_graphs
        self._streams = streams or Streams(device)
        self.sizes = tuple(sorted({size for kind in kinds for size in kind.sizes}))
        self._hidden = torch.empty(0, device=device)  # [T, D] of the largest, from `capture` on
        self._forwards: dict[tuple[ChunkInputs, int], ReplayableInPieces] = {}

    @property
    def is_captured(self) -> bool:
        """Whether steps can be run."""
        return len(self._forwards) == sum(len(kind.sizes) for kind in self._kinds)

    @torch.inference_mode()
    def capture(
        self, progress: CaptureProgress | None = None, *, group: RankGroup | None = None
    ) -> None:
        """Warm up and capture every size, the largest first.

        Every rank that shares the model has to call it at the same time: steps are run, with
        padding only, and what they write goes into the dummy block. Weights that are made at first
        use must have been made.

        Args:
            progress: told how many sizes are done.
            group: these ranks, for host memory, to agree on each size; None for a rank alone.

        Raises:
            CaptureError: the model of a rank cannot be captured, which all of them say.
            RuntimeError: of this rank's device.
            PeerLostError: another rank ended.
        """
        assert not self._forwards
        make = Capture(self._streams).in_pieces if self._use_graphs else CalledPieces
        captured = capture_each(self.sizes, partial(self._capture_size, make=make), group)
        for count, size in enumerate(captured, start=1):
            logger.debug("captured steps of prefill num_tokens=%d", size)
            if progress is not None:
                progress(count, len(self.sizes))

    def close(self) -> None:
        """Forget what was captured; no step may follow.

        To be called before the groups end: NCCL waits for the last graph with its kernels in it.
        """
        for captured in self._forwards.values():
            captured.reset()
        self._forwards.clear()

    def kind_of(self, batch: ForwardBatch) -> ChunkInputs | None:
        """Return the kind of a step, alike on all ranks; None where nothing was captured for it."""
        if not batch.lengths or batch.num_rows is not None:
            return None
        return next((kind for kind in self._kinds if kind.takes(batch)), None)

    @torch.inference_mode()
    def run(
        self,
        batch: ForwardBatch,
        kind: ChunkInputs,
        on_piece_done: Callable[[], None] = do_nothing,
    ) -> Tensor:
        """Copy a step in, and replay it; the host does not wait.

        Args:
            batch: of the step.
            kind: of the same, by `kind_of`.
            on_piece_done: called whenever `LAYERS_OF_A_PIECE` layers are issued and more follow,
                in steps that are in pieces.

        Returns:
            [T, D] hidden states after the final norm, which the next step overwrites.
        """
        assert self.is_captured
        size = bucket_for(batch.num_tokens, kind.sizes)
        kind.load(batch, size)
        self._forwards[kind, size].replay(on_piece_done)
        return self._hidden[: batch.num_tokens]

    def _capture_size(self, size: int, make: Callable[[WorkInPieces], ReplayableInPieces]) -> None:
        for kind in self._kinds:
            if size in kind.sizes:
                self._capture_kind(kind, size, make)

    def _capture_kind(
        self, kind: ChunkInputs, size: int, make: Callable[[WorkInPieces], ReplayableInPieces]
    ) -> None:
        kind.clear(size)
        if not self._forwards:  # the largest one
            hidden = self._model.forward(kind.batch(size), self._kv_pool)
            self._hidden = torch.empty_like(hidden)
        self._forwards[kind, size] = make(partial(self._run_model, kind, size))

    def _run_model(self, kind: ChunkInputs, size: int, cut: Callable[[], None]) -> None:
        def layer_done(index: int) -> None:
            if kind.is_in_pieces and (index + 1) % LAYERS_OF_A_PIECE == 0:
                cut()

        hidden = self._model.forward(kind.batch(size), self._kv_pool, on_layer_done=layer_done)
        self._hidden[:size].copy_(hidden)


class ReplayedSteps:
    """A model whose captured steps are replayed: a `CausalModel`, with one KV pool."""

    def __init__(self, model: CausalModel, graphs: ChunkGraphs, num_layers: int) -> None:
        """Take a model of so many layers, and its captured steps."""
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
        """See `CausalModel`; of a replayed step the layers of a piece are done at once."""
        kind = self._graphs.kind_of(batch)
        if kind is None:
            return self._model.forward(
                batch, kv_pool, on_layer_done=on_layer_done, meanwhile=meanwhile
            )
        layers = iter(range(self._num_layers))

        def tell(count: int) -> None:
            for index in islice(layers, count):
                if on_layer_done is not None:
                    on_layer_done(index)
            meanwhile()

        hidden = self._graphs.run(batch, kind, partial(tell, LAYERS_OF_A_PIECE))
        tell(self._num_layers)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `CausalModel`."""
        return self._model.compute_logits(hidden)


def capture_chunks(
    runner: ModelRunner,
    model: ServedModel,
    *,
    sizes: Sequence[int],
    max_num_seqs: int,
    max_model_len: int,
    group: RankGroup | None = None,
    progress: CaptureProgress | None = None,
    use_graphs: bool | None = None,
    streams: Streams | None = None,
) -> tuple[ModelRunner, Callable[[], None]]:
    """Return a runner that replays captured steps, and what forgets them again; all ranks call.

    Args:
        runner: of the model.
        model: that `why_no_chunks` says nothing against.
        sizes: numbers of tokens, ascending.
        max_num_seqs: most requests of a step.
        max_model_len: most tokens of a request.
        group: of these ranks, for host memory; None for a rank alone.
        progress: told how many sizes are done.
        use_graphs: as in `ChunkGraphs`.
        streams: as in `ChunkGraphs`.

    Raises:
        CaptureError: the model of a rank cannot be captured, which all of them say; the runner
            still works.
        RuntimeError: of this rank's device.
        PeerLostError: another rank ended.
    """
    pool = runner.kv_pool
    kinds = chunk_kinds(model, pool, sizes, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    graphs = ChunkGraphs(model, pool, kinds, use_graphs=use_graphs, streams=streams)
    capture_or_close(graphs, progress, group)
    logger.info("captured steps of prefill num_tokens=%s", graphs.sizes)
    short = ReplayedSteps(model, graphs, model.config.num_hidden_layers)
    following = ModelRunner(
        short, pool, runner.sampler, in_group=runner.in_group, drafts=runner.drafts
    )
    return following, graphs.close
