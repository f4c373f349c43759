"""Which steps of a rank are captured, and what it says where they cannot be.

All ranks of an instance call alike: a step that a graph cannot hold leaves all of them without
graphs ("auto") or ends all ("on"); too little memory, or a device that fails, ends the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from engine.boot.open_execution import overlap_of
from engine.boot.refusals import refuse_capture
from engine.graphs.buckets import batch_buckets
from engine.graphs.capture import CaptureProgress
from engine.graphs.capture_errors import CaptureError
from engine.graphs.chunk_graphs import (
    SUFFIX_SIZES,
    ChunkGraphs,
    capture_chunks,
    chunk_kinds,
    chunk_sizes,
    num_kinds,
    why_no_chunks,
)
from engine.graphs.graph_budget import MakeSteps
from engine.graphs.step_graphs import StepGraphs
from engine.memory.kv_budget import MemorySums
from engine.memory.kv_pool import KVPool
from engine.model.spec import ServedModel
from engine.operations import do_nothing
from engine.options import ChunkSteps, EngineOptions, Switch, TokenSteps
from engine.parallel.groups import RankGroup
from engine.runner import ModelRunner
from engine.streams import Streams
from engine.weights.progress import Unit, progress_bar
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger

CapturedT = TypeVar("CapturedT")

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsToCapture:
    """What a rank captures.

    Attributes:
        make: the steps of some sizes over a pool.
        sizes: all of them, ascending; empty where steps of the model cannot be captured.
        variants: in how many forms a size is captured.
    """

    make: MakeSteps
    sizes: tuple[int, ...]
    variants: Callable[[int], int]


def steps_to_capture(
    options: EngineOptions, model: ServedModel, max_model_len: int, streams: Streams
) -> StepsToCapture:
    """Return what a rank captures.

    Args:
        options: of the engine, which wants graphs.
        model: loaded.
        max_model_len: most tokens of a request.
        streams: of the rank.

    Raises:
        ConfigError: graphs are asked for by name, and this model has no steps for them.
    """
    match options.steps:
        case TokenSteps() as tokens:
            return _token_steps(options, tokens, model, max_model_len, streams)
        case ChunkSteps() as chunks:
            return StepsToCapture(
                make=_chunk_steps(options, model, max_model_len, streams),
                sizes=() if _why_no_chunks(options, model) else _sizes(chunks, model),
                variants=num_kinds,
            )


def capture_short_steps(
    options: EngineOptions,
    model: ServedModel,
    runner: ModelRunner,
    max_model_len: int,
    sums: MemorySums | None,
    *,
    streams: Streams,
) -> tuple[ModelRunner, Callable[[], None]]:
    """Capture a rank's short steps where that is wanted and possible.

    Args:
        options: of the engine.
        model: of the runner.
        runner: of steps of any length.
        max_model_len: most tokens of a request.
        sums: of the device's memory, where they were taken.
        streams: of the rank.

    Returns:
        The runner to use, and what forgets its graphs: to be called before the groups end.

    Raises:
        ConfigError: graphs are asked for, and the step of a rank cannot be captured; or the device
            has no memory for them, or fails.
        PeerLostError: another rank ended meanwhile.
    """
    steps = options.steps
    if not options.wants_graphs or not isinstance(steps, ChunkSteps):
        return runner, do_nothing
    reason = _why_no_chunks(options, model)
    if reason:
        logger.info("short steps are not captured %s", fields(reason=reason))
        return runner, do_nothing
    group = model.groups.boot_group
    capture = partial(
        capture_chunks,
        runner,
        model,
        sizes=_sizes(steps, model),
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
        group=group,
        streams=streams,
    )
    show = model.groups.dims.rank == 0
    captured = try_to_capture(
        options, lambda told: capture(progress=told), group=group, sums=sums, show=show
    )
    return captured or (runner, do_nothing)


def try_to_capture(
    options: EngineOptions,
    capture: Callable[[CaptureProgress | None], CapturedT],
    *,
    group: RankGroup,
    sums: MemorySums | None,
    show: bool,
) -> CapturedT | None:
    """Return what `capture` returns; None where steps cannot be captured and need not be.

    Args:
        options: of the engine, which wants graphs.
        capture: told where to tell progress.
        group: of all ranks that capture together.
        sums: of the device's memory, where they were taken.
        show: draw a progress bar.

    Raises:
        ConfigError: graphs are asked for, and the step of a rank cannot be captured; or the device
            has no memory for them, or fails.
        PeerLostError: another rank ended meanwhile.
    """
    with progress_bar("capturing steps", unit=Unit.CALLS) if show else nullcontext() as moved:
        try:
            return capture(moved)
        except RuntimeError as error:
            if isinstance(error, CaptureError) and options.steps.cuda_graphs is Switch.AUTO:
                logger.warning(
                    "steps run without graphs, on every rank, several times slower %s",
                    fields(reason=error),
                )
                return None
            refusal = refuse_capture(options, error, sums, in_group=group.size > 1)
            if refusal is None:
                raise
            raise refusal from error


def _token_steps(
    options: EngineOptions,
    steps: TokenSteps,
    model: ServedModel,
    max_model_len: int,
    streams: Streams,
) -> StepsToCapture:
    def make(pool: KVPool, buckets: tuple[int, ...]) -> StepGraphs:
        return StepGraphs(
            model,
            pool,
            vocab_size=model.config.vocab_size,
            max_num_seqs=options.max_num_seqs,
            max_model_len=max_model_len,
            buckets=buckets,
            num_drafts=options.draft_choices,
            streams=streams,
        )

    return StepsToCapture(
        make=make,
        sizes=batch_buckets(options.max_num_seqs),
        variants=lambda size: len(options.draft_choices.of(size)),
    )


def _sizes(steps: ChunkSteps, model: ServedModel) -> tuple[int, ...]:
    """Return the numbers of tokens to capture: long steps not where they run in two halves."""
    most = steps.max_num_batched_tokens
    if overlap_of(steps, model.groups.dims) is not None:
        most = min(most, SUFFIX_SIZES[-1])
    return chunk_sizes(most)


def _chunk_steps(
    options: EngineOptions, model: ServedModel, max_model_len: int, streams: Streams
) -> MakeSteps:
    def make(pool: KVPool, sizes: tuple[int, ...]) -> ChunkGraphs:
        kinds = chunk_kinds(
            model,
            pool,
            sizes,
            max_num_seqs=options.max_num_seqs,
            max_model_len=max_model_len,
        )
        return ChunkGraphs(model, pool, kinds, streams=streams)

    return make


def _why_no_chunks(options: EngineOptions, model: ServedModel) -> str:
    """Return why short steps are not captured, or nothing; refuse if they are asked for by name."""
    reason = why_no_chunks(model)
    if reason and options.steps.cuda_graphs is Switch.ON:
        raise ConfigError(options.named("cuda_graphs"), "on", reason, '"auto" or "off"')
    return reason
