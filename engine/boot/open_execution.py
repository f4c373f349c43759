"""How a booted rank runs its steps, by what its options say.

One function turns them into an `Execution` and opens what that holds, a dispatcher. All ranks
call it before the model is built, and close what it opened after the last step. What "auto" means
is in the constants here (of dispatchers: in `choose_dispatcher`), and is decided by measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from engine.boot.experts import open_dispatcher
from engine.execution import Execution
from engine.graphs.chunk_graphs import SUFFIX_SIZES
from engine.kernels.base import Kernels
from engine.micro_batches import OverlapRule
from engine.model.spec import CommonConfig
from engine.operations import do_nothing
from engine.options import ChunkSteps, EngineOptions, Switch, TokenSteps
from engine.parallel.choose_dispatcher import OpenDispatcher, Play, RankExperts
from engine.parallel.choose_tp_exchange import OpenGroup, choose_tp_exchange
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups
from engine.parallel.short_rows import most_masked_tokens
from engine.parallel.wait_recorder import WaitRecorder
from engine.side_stream import SideRule, SideStream
from engine.streams import Streams
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger

AUTO_OVERLAP: Final = False
"""Whether `ChunkSteps.two_batch_overlap` overlaps if it is "auto". With tp nothing was gained on 4
GPUs: NCCL's kernels take SMs from the GEMMs that are to cover them, and the host launches twice as
much. With dp it is not measured."""

AUTO_DEPENDENT_LAUNCHES: Final = True
"""Whether `TokenSteps.dependent_launches` is on, on GPUs, if it is "auto": a layer of 64 or 128
requests takes 7 us less on one H200, with the same results bit by bit."""


AUTO_DEPENDENT_SHORT_STEPS: Final = True
"""Whether `ChunkSteps.dependent_launches` is on, on GPUs, if it is "auto": captured steps of
suffixes give the same bits and take 1.5 % less on one H200, 0.6 % on four that share heads."""

SHORT_SIDE_TOKENS: Final = SUFFIX_SIZES[-1]
"""Most tokens of a step of chunks whose shared expert has a stream of its own: longer steps are not
captured, and another stream costs the host more than it gains them."""


AUTO_MASKED_TOKENS: Final = 256
"""What `ChunkSteps.max_masked_tokens` is if it is "auto". On one H200, as one of eight ranks that
share heads, a layer of 32 to 256 tokens takes 17 to 33 % less, and a whole step of 64 21 %."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenExecution:
    """An execution, and how to close what it holds, whichever is the calling thread's device."""

    execution: Execution
    close: Callable[[], None] = do_nothing


def open_execution(
    options: EngineOptions,
    config: CommonConfig,
    groups: ProcessGroups,
    *,
    kernels: Kernels,
    num_physical_experts: int,
    streams: Streams,
    play: Play | None = None,
    waits: WaitRecorder | None = None,
) -> OpenExecution:
    """Open what the options ask for; all ranks of the instance call.

    Args:
        options: of the engine.
        config: of the model.
        groups: the ranks.
        kernels: of the model.
        num_physical_experts: slots of all ranks.
        streams: of this rank, and its device.
        play: for measurements: makes the dispatcher of a rank alone that plays one of many; None
            to be itself.
        waits: records who waits for whom; None for nobody.

    Raises:
        ConfigError: what is asked for does not run here.
    """
    opened: OpenDispatcher | None = None
    device, max_masked = streams.device, 0
    exchange = _open_exchange(options, config, groups, device)
    groups = replace(groups, tp_group=exchange.group)
    if config.experts is None:
        _refuse_masked(options, "the model has no experts")
    else:
        experts = RankExperts(
            config=config.experts,
            groups=groups,
            kernels=kernels,
            device=device,
            num_physical_experts=num_physical_experts,
            scatter_tokens=options.steps.scatter_tokens,
            waits=waits,
        )
        opened, max_masked = _open(options, experts, play)
    dispatcher = None if opened is None else opened.dispatcher
    match options.steps:
        case ChunkSteps() as chunks:
            execution = _of_chunks(chunks, streams, groups.dims)
        case TokenSteps() as tokens:
            execution = _of_tokens(tokens, streams, is_alone=groups.dims.dp == 1 and play is None)
    execution = replace(
        execution,
        dispatcher=dispatcher,
        max_masked_tokens=max_masked,
        tp_group=exchange.group,
    )
    closing = [exchange.close] if opened is None else [exchange.close, opened.close]
    return OpenExecution(execution=execution, close=partial(_close_on, device, closing))


def _open_exchange(
    options: EngineOptions, config: CommonConfig, groups: ProcessGroups, device: torch.device
) -> OpenGroup:
    """Return the ranks that share heads, with what they send rows by."""
    steps = options.steps
    if not isinstance(steps, ChunkSteps):
        return OpenGroup(group=groups.tp_group)
    return choose_tp_exchange(
        groups.tp_group,
        steps.tp_exchange,
        device=device,
        max_tokens=options.max_rows,
        hidden_size=config.hidden_size,
        is_scattered=steps.scatter_tokens,
        overlaps=overlap_of(steps, groups.dims) is not None,
    )


def _open(
    options: EngineOptions, experts: RankExperts, play: Play | None
) -> tuple[OpenDispatcher, int]:
    """Return what brings tokens to experts, and the most tokens whose rows are laid out masked."""
    max_masked = choose_masked_tokens(options, experts)
    experts = replace(experts, max_masked_tokens=max_masked)
    return open_dispatcher(options, experts, play=play), max_masked


def _close_on(device: torch.device, closing: Sequence[Callable[[], None]]) -> None:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for close in closing:
            close()


def overlap_of(steps: ChunkSteps, dims: ParallelDims) -> OverlapRule | None:
    """Return when steps run as two micro-batches; None for never."""
    if steps.two_batch_overlap is Switch.AUTO:
        is_on = AUTO_OVERLAP and dims.tp > 1
    else:
        is_on = steps.two_batch_overlap is Switch.ON
    return OverlapRule() if is_on else None


def choose_masked_tokens(options: EngineOptions, experts: RankExperts) -> int:
    """Choose the most tokens of a step whose experts take masked rows, and say why; 0 for none.

    Args:
        options: of the engine.
        experts: of this rank.

    Raises:
        ConfigError: a number is asked for, and no step could be laid out so.
    """
    wanted = options.steps.max_masked_tokens
    reason, chosen = why_not_masked(experts), 0
    if reason:
        _refuse_masked(options, reason)
    else:
        asked, reason = AUTO_MASKED_TOKENS, "as measured"
        if wanted is not Switch.AUTO:
            asked, reason = wanted, "asked for"
        chosen = most_masked_tokens(asked, experts.config.num_experts_per_tok, experts.num_slots)
        if chosen < asked:
            reason = "with more tokens experts have rows enough for tiles of 128"
    if isinstance(options.steps, ChunkSteps):
        facts = fields(max_masked_tokens=chosen, wanted=wanted, reason=reason)
        logger.info("chose masked rows %s", facts)
    return chosen


def why_not_masked(experts: RankExperts) -> str:
    """Return why steps of chunks never lay out rows masked, or nothing."""
    dims = experts.groups.dims
    if not experts.config.num_moe_layers:
        return "no layer has experts"
    if not experts.are_quantized:
        return "the experts' weights are not FP8"
    if dims.ep > 1 and dims.tp == 1:
        return "rows come to experts one by one, each rank has tokens of its own"
    return ""


def _refuse_masked(options: EngineOptions, reason: str) -> None:
    """Refuse a number of tokens that would be without effect."""
    wanted = options.steps.max_masked_tokens
    if wanted is not Switch.AUTO and wanted:
        raise ConfigError(options.named("max_masked_tokens"), wanted, reason, '"auto" or 0')


def shared_expert_stream(
    steps: TokenSteps, streams: Streams, *, is_alone: bool
) -> SideStream | None:
    """Return a stream of its own for the shared expert, if it is to overlap with anything.

    Args:
        steps: say whether it is to.
        streams: of this rank.
        is_alone: whether no other rank gets tokens of this one.
    """
    if streams.device.type != "cuda" or is_alone or not steps.overlap_shared_expert:
        return None
    return SideStream(streams)


def _of_chunks(steps: ChunkSteps, streams: Streams, dims: ParallelDims) -> Execution:
    """Return how chunks run, but for where their tokens go."""
    return Execution(
        scatter_tokens=steps.scatter_tokens,
        overlap=overlap_of(steps, dims),
        overlap_shared_expert=steps.overlap_shared_expert,
        side_stream=short_step_stream(steps, streams, dims),
        side_rule=SideRule(max_tokens=SHORT_SIDE_TOKENS, in_halves=dims.world_size > 1),
        dependent_launches=launches_short_steps_dependently(steps, streams.device),
    )


def _of_tokens(steps: TokenSteps, streams: Streams, *, is_alone: bool) -> Execution:
    """Return how steps of one token each run, but for where their tokens go."""
    return Execution(
        overlap_shared_expert=steps.overlap_shared_expert,
        side_stream=shared_expert_stream(steps, streams, is_alone=is_alone),
        dependent_launches=launches_dependently(steps, streams.device),
    )


def short_step_stream(steps: ChunkSteps, streams: Streams, dims: ParallelDims) -> SideStream | None:
    """Return a stream of its own for the shared expert of short steps, where they are captured.

    A rank alone has one too: routing and the placing of rows read next to nothing.
    """
    is_captured = steps.cuda_graphs is not Switch.OFF and dims.dp == 1
    if streams.device.type != "cuda" or not is_captured or not steps.overlap_shared_expert:
        return None
    return SideStream(streams)


def launches_short_steps_dependently(steps: ChunkSteps, device: torch.device) -> bool:
    """Return whether captured short steps of prefill are launched as steps of decode are."""
    if steps.dependent_launches is Switch.AUTO:
        return device.type == "cuda" and AUTO_DEPENDENT_SHORT_STEPS
    return steps.dependent_launches is Switch.ON


def launches_dependently(steps: TokenSteps, device: torch.device) -> bool:
    """Return whether a kernel of a step is brought onto the GPU while the one before it runs."""
    if steps.dependent_launches is Switch.AUTO:
        return device.type == "cuda" and AUTO_DEPENDENT_LAUNCHES
    return steps.dependent_launches is Switch.ON
