"""How a booted rank runs its steps, by what the configuration of its role says.

One function turns a section into an `Execution` and opens what that holds: a dispatcher, buffers of
collectives. All ranks call it before the model is built, and close what it opened after the last
step. What "auto" means is in the constants here, and is decided by measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import torch

from engine.boot_experts import open_transfers
from engine.execution import Execution
from engine.kernels.base import Kernels
from engine.micro_batches import OverlapRule
from engine.model.spec import CommonConfig
from engine.parallel.expert_placement import ExpertPlacement
from engine.parallel.groups import ProcessGroups
from engine.parallel.symmetric import SymmetricGroup, SymmetricOptions, open_symmetric_group
from engine.parallel.token_dispatcher import TURNS_LAG
from engine.side_stream import SideStream
from runtime.config import DecodeSection, PrefillSection
from runtime.errors import ConfigError

AUTO_COLLECTIVES: Final = "nccl"
"""What `prefill.collectives = "auto"` is on GPUs."""

AUTO_OVERLAP: Final = {"nccl": False, "symmetric": False}
"""Whether `prefill.two_batch_overlap = "auto"` overlaps, by collectives.

With NCCL nothing was gained on 4 GPUs: its kernels take multiprocessors from the products that are
to cover them, and the host launches twice as much. Symmetric ones are not measured yet. Nor are
ranks of `prefill.dp`, which do not overlap."""

AUTO_DECODE_OVERLAP: Final = False
"""Whether `decode.two_batch_overlap = "auto"` overlaps. Each half reads all weights: on four H200 a
step takes 1.5 times as long, with 128 requests a rank and with 256."""

AUTO_DEPENDENT_LAUNCHES: Final = True
"""Whether `decode.dependent_launches = "auto"` is on, on GPUs: a layer of 64 or 128 requests takes
7 us less on one H200, with the same results bit by bit."""

_MIN_SYMMETRIC_BYTES = 64 * 2**20


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
    opened = open_transfers(
        section,
        config,
        groups,
        kernels,
        placement,
        is_halved=halves_steps(section),
        played_ranks=played_ranks,
    )
    dispatcher = None if opened is None else opened.dispatcher
    takes_turns = dispatcher is not None and dispatcher.takes_turns
    if isinstance(section, DecodeSection):
        symmetric = None
        execution = Execution(
            dispatcher=dispatcher,
            overlap=decode_overlap(section, takes_turns=takes_turns),
            overlap_shared_expert=section.overlap_shared_expert,
            side_stream=shared_expert_stream(section, device, played_ranks=played_ranks),
            dependent_launches=launches_dependently(section),
        )
    else:
        symmetric = _open_symmetric(section, config, groups, kernels, device)
        execution = Execution(
            scatter_tokens=section.is_scattered,
            collectives=symmetric,
            dispatcher=dispatcher,
            overlap=prefill_overlap(section, is_symmetric=symmetric is not None),
        )

    def close() -> None:
        for part in (symmetric, opened):
            if part is not None:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    part.close()

    return OpenExecution(execution=execution, close=close)


def prefill_overlap(section: PrefillSection, *, is_symmetric: bool) -> OverlapRule | None:
    """Return when steps run as two micro-batches; None for never."""
    if section.two_batch_overlap == "auto":
        is_on = section.tp > 1 and AUTO_OVERLAP["symmetric" if is_symmetric else "nccl"]
    else:
        is_on = section.two_batch_overlap == "on"
    return OverlapRule() if is_on else None


def halves_steps(section: PrefillSection | DecodeSection) -> bool:
    """Return whether every step of a decode rank runs as two micro-batches; never in prefill."""
    if not isinstance(section, DecodeSection) or section.dp == 1:
        return False
    if section.two_batch_overlap == "auto":
        return AUTO_DECODE_OVERLAP
    return section.two_batch_overlap == "on"


def decode_overlap(section: DecodeSection, *, takes_turns: bool) -> OverlapRule | None:
    """Return how steps run as two micro-batches; None for as one.

    Args:
        section: of the role.
        takes_turns: of the dispatcher (see `TokenDispatcher`).
    """
    return decode_rule(takes_turns=takes_turns) if halves_steps(section) else None


def decode_rule(*, takes_turns: bool) -> OverlapRule:
    """Return the rule by which all steps run as two micro-batches; `takes_turns` as above."""
    return OverlapRule(min_tokens=0, lag=TURNS_LAG if takes_turns else 1)


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


def _open_symmetric(
    section: PrefillSection,
    config: CommonConfig,
    groups: ProcessGroups,
    kernels: Kernels,
    device: torch.device,
) -> SymmetricGroup | None:
    """Open collectives with room for the largest sum of a step, where they are wanted."""
    wanted = section.collectives
    if wanted == "auto" and section.device == "cuda" and section.is_scattered:
        wanted = AUTO_COLLECTIVES
    if wanted != "symmetric":
        return None
    # Rows are padded to a multiple of the ranks; sums travel in the compute dtype.
    num_rows = section.max_num_batched_tokens + groups.dims.tp
    largest = num_rows * config.hidden_size * torch.bfloat16.itemsize
    options = SymmetricOptions(
        max_bytes=max(largest, _MIN_SYMMETRIC_BYTES), sum_slices=kernels.sum_slices
    )
    group = open_symmetric_group(groups.tp_group, device, options)
    if group is None and section.collectives == "symmetric":
        problem = "the ranks cannot read each other's memory"
        raise ConfigError("prefill.collectives", "symmetric", problem, '"nccl" or "auto"')
    return group
