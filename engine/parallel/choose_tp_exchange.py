"""How ranks that share heads send one another rows and sums: chosen once, and opened.

For ranks that each keep a share of a step's rows, so that they gather and reduce-scatter. The first
line that applies is taken; "auto" is all but what is asked for by name.

| where                                                           | rows travel by  |
|-----------------------------------------------------------------|-----------------|
| asked for "collectives", a rank alone, no shares, a CPU         | the library     |
| two micro-batches in turns, which have two transfers in flight  | the library     |
| GPUs that map one another's memory, with Triton                 | NVLink stores   |
| all others                                                      | the library     |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from engine.operations import do_nothing
from engine.options import TPExchangeKind
from engine.parallel.groups import RankGroup
from engine.parallel.nvlink import open as nvlink
from engine.parallel.nvlink.all_gather import GatherShape
from engine.parallel.nvlink.reduce_scatter import ReduceShape
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger

GATHERED_BYTES: Final = 2
"""Of all rows that are gathered in a layer, for each number of a hidden state: rows of FP8 with
their scales are one and a bit, latents half of one."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group with what was opened for it, and how to close that, all ranks together."""

    group: RankGroup
    close: Callable[[], None] = do_nothing


def choose_tp_exchange(
    group: RankGroup,
    kind: TPExchangeKind,
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
        reason = "two micro-batches have two transfers in flight"
    if not reason:
        opened, reason = _open_nvlink(group, kind, max_tokens, hidden_size)
    elif kind is TPExchangeKind.NVLINK:
        raise ConfigError("tp_exchange", str(kind), reason, '"auto" or "collectives"')
    if group.size > 1:
        name = "collectives" if opened.group is group else "nvlink"
        logger.info("chose exchange of rows %s", fields(name=name, wanted=kind, reason=reason))
    return opened


def _why_library(
    group: RankGroup, kind: TPExchangeKind, device: torch.device, is_scattered: bool
) -> str:
    """Return why nothing else comes into question, or nothing."""
    if group.size == 1:
        return "the rank is alone"
    if kind is TPExchangeKind.COLLECTIVES:
        return "asked for"
    if not is_scattered:
        return "no rank keeps a share of the rows"
    return "" if device.type == "cuda" else "the device is a CPU"


def _open_nvlink(
    group: RankGroup, kind: TPExchangeKind, max_tokens: int, hidden_size: int
) -> tuple[OpenGroup, str]:
    """Open NVLink stores; the group as it is where they do not run, and why."""
    max_rows = -(-max_tokens // group.size)
    try:
        sums = ReduceShape(num_ranks=group.size, max_rows=max_rows, hidden_size=hidden_size)
        gathers = GatherShape(
            num_ranks=group.size, max_rows=max_rows, row_bytes=GATHERED_BYTES * hidden_size
        )
        opened = nvlink.open_nvlink_exchange(group, sums, gathers)
    except ConfigError as error:
        if kind is TPExchangeKind.NVLINK:
            raise
        return OpenGroup(group=group), str(error)

    def close() -> None:
        for one in opened:
            one.close()

    return OpenGroup(group=group.exchanging_by(*opened), close=close), "it runs here"
