"""How a booted rank runs its steps, by what the configuration of its role says.

One function turns a section into an `Execution` and opens what that holds, a dispatcher. All ranks
call it before the model is built, and close what it opened after the last step. What "auto" means
is in the constants here (of dispatchers: in `choose_dispatcher`), and is decided by measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import torch

from engine.boot.experts import open_dispatcher
from engine.execution import Execution
from engine.kernels.base import Kernels
from engine.micro_batches import OverlapRule
from engine.model.spec import CommonConfig
from engine.parallel.choose_dispatcher import OpenDispatcher, RankExperts
from engine.parallel.expert_placement import ExpertPlacement
from engine.parallel.groups import ProcessGroups
from engine.side_stream import SideStream
from runtime.config import DecodeSection, PrefillSection

AUTO_OVERLAP: Final = False
"""Whether `prefill.two_batch_overlap = "auto"` overlaps. With `prefill.tp` nothing was gained on 4
GPUs: NCCL's kernels take SMs from the GEMMs that are to cover them, and the host
launches twice as much. Ranks of `prefill.dp` are not measured."""

AUTO_DEPENDENT_LAUNCHES: Final = True
"""Whether `decode.dependent_launches = "auto"` is on, on GPUs: a layer of 64 or 128 requests takes
7 us less on one H200, with the same results bit by bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenExecution:
    """An execution, and how to close what it holds, whichever is the calling thread's device."""

    execution: Execution
    close: Callable[[], None] = lambda: None


def open_execution(
    section: PrefillSection | DecodeSection,
    config: CommonConfig,
    groups: ProcessGroups,
    *,
    kernels: Kernels,
    placement: ExpertPlacement,
    device: torch.device,
    played_ranks: int = 0,
) -> OpenExecution:
    """Open what the section asks for; all ranks of the instance call.

    Args:
        section: of the role.
        config: of the model.
        groups: the ranks.
        kernels: of the model.
        placement: of its experts.
        device: of this rank.
        played_ranks: for measurements: a decode rank alone plays one of so many; 0 to be itself.

    Raises:
        ConfigError: what is asked for does not run here.
    """
    opened: OpenDispatcher | None = None
    if config.experts is not None:
        experts = RankExperts(
            config=config.experts,
            groups=groups,
            kernels=kernels,
            device=device,
            num_physical_experts=placement.num_physical_experts,
            scatter_tokens=isinstance(section, PrefillSection) and section.is_scattered,
        )
        opened = open_dispatcher(section, experts, played_ranks=played_ranks)
    dispatcher = None if opened is None else opened.dispatcher
    if isinstance(section, DecodeSection):
        execution = Execution(
            dispatcher=dispatcher,
            overlap_shared_expert=section.overlap_shared_expert,
            side_stream=shared_expert_stream(section, device, played_ranks=played_ranks),
            dependent_launches=launches_dependently(section),
        )
    else:
        execution = Execution(
            scatter_tokens=section.is_scattered,
            dispatcher=dispatcher,
            overlap=prefill_overlap(section),
        )

    def close() -> None:
        if opened is None:
            return
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            opened.close()

    return OpenExecution(execution=execution, close=close)


def prefill_overlap(section: PrefillSection) -> OverlapRule | None:
    """Return when steps run as two micro-batches; None for never."""
    if section.two_batch_overlap == "auto":
        is_on = AUTO_OVERLAP and section.tp > 1
    else:
        is_on = section.two_batch_overlap == "on"
    return OverlapRule() if is_on else None


def shared_expert_stream(
    section: DecodeSection, device: torch.device, *, played_ranks: int = 0
) -> SideStream | None:
    """Return a stream of its own for the shared expert, if it is to overlap with anything."""
    travels = max(section.dp, played_ranks) > 1
    if device.type != "cuda" or not travels or not section.overlap_shared_expert:
        return None
    return SideStream(device)


def launches_dependently(section: DecodeSection) -> bool:
    """Return whether a kernel of a step is brought onto the GPU while the one before it runs."""
    if section.dependent_launches == "auto":
        return section.device == "cuda" and AUTO_DEPENDENT_LAUNCHES
    return section.dependent_launches == "on"
