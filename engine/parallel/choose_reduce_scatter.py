"""How ranks that share heads sum their parts: chosen once, and opened where it needs that.

For ranks that each keep a share of a step's rows, so that a sum is a reduce-scatter. The first line
that applies is taken; "auto" is all but what is asked for by name.

| where                                                      | sums by         |
|------------------------------------------------------------|-----------------|
| asked for "collectives", a rank alone, a CPU, no shares    | the library     |
| two micro-batches in turns, which have two sums in flight  | the library     |
| GPUs that map one another's memory, with Triton            | NVLink stores   |
| all others                                                 | the library     |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.operations import do_nothing
from engine.options import ReduceScatterKind
from engine.parallel.groups import RankGroup
from engine.parallel.nvlink import open as nvlink
from engine.parallel.nvlink.reduce_scatter import ReduceShape
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group with what was opened for its sums, and how to close that, all ranks together."""

    group: RankGroup
    close: Callable[[], None] = do_nothing


def choose_reduce_scatter(
    group: RankGroup,
    kind: ReduceScatterKind,
    *,
    device: torch.device,
    max_tokens: int,
    hidden_size: int,
    is_scattered: bool,
    overlaps: bool,
) -> OpenGroup:
    """Choose by the table of the module, and open what that needs; all ranks call.

    Args:
        group: the ranks that share heads.
        kind: what is asked for: by name it runs, or is refused.
        device: of this rank.
        max_tokens: most of a step, of all ranks; longer ones are the library's.
        hidden_size: of a row.
        is_scattered: whether each rank keeps its share of the rows.
        overlaps: whether steps run as two micro-batches.

    Raises:
        ConfigError: what was asked for does not run here.
    """
    opened, reason = OpenGroup(group=group), _why_library(group, kind, device, is_scattered)
    if not reason and overlaps:
        reason = "two micro-batches have two sums in flight"
    if not reason:
        opened, reason = _open_nvlink(group, kind, max_tokens, hidden_size)
    elif kind is ReduceScatterKind.NVLINK:
        raise ConfigError("reduce_scatter", str(kind), reason, '"auto" or "collectives"')
    if group.size > 1:
        name = "collectives" if opened.group is group else "nvlink"
        logger.info("chose reduce-scatter %s", fields(name=name, wanted=kind, reason=reason))
    return opened


def _why_library(
    group: RankGroup, kind: ReduceScatterKind, device: torch.device, is_scattered: bool
) -> str:
    """Return why nothing else comes into question, or nothing."""
    if group.size == 1:
        return "the rank is alone"
    if kind is ReduceScatterKind.COLLECTIVES:
        return "asked for"
    if not is_scattered:
        return "no rank keeps a share of the rows"
    return "" if device.type == "cuda" else "the device is a CPU"


def _open_nvlink(
    group: RankGroup, kind: ReduceScatterKind, max_tokens: int, hidden_size: int
) -> tuple[OpenGroup, str]:
    """Open sums by NVLink stores; the group as it is where they do not run, and why."""
    try:
        shape = ReduceShape(
            num_ranks=group.size,
            max_rows=-(-max_tokens // group.size),
            hidden_size=hidden_size,
        )
        opened = nvlink.open_nvlink_reduce_scatter(group, shape)
    except ConfigError as error:
        if kind is ReduceScatterKind.NVLINK:
            raise
        return OpenGroup(group=group), str(error)
    return OpenGroup(group=group.summed_by(opened), close=opened.close), "it runs here"
