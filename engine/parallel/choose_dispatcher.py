"""How tokens are dispatched to experts: chosen once, before its model is built.

Called while a worker or a measurement boots, and by a model that was given no dispatcher; all ranks
call, because some ways open memory together. Whoever calls closes what was opened, all ranks
together, after the last step and before the process groups end. What "auto" became is logged.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from engine.config import DeepseekV3Config
from engine.formats.base import NumberFormat
from engine.kernels.base import Kernels
from engine.options import DispatcherKind
from engine.parallel import deep_ep
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_normal_dispatcher import DeepEPNormalDispatcher
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.gathered_dispatcher import GatheredDispatcher
from engine.parallel.groups import ProcessGroups
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.nvlink import open as nvlink
from engine.parallel.nvlink.dispatcher import NvlinkDispatcher
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.row_formats import AlignedQuantized, ExpertShare, RowFormat, choose_row_format
from engine.parallel.short_rows import ShortQuantized
from engine.parallel.token_dispatcher import TokenDispatcher
from engine.parallel.wait_recorder import WaitRecorder
from engine.weights.expert_format import experts_are_quantized
from runtime.errors import ConfigError
from runtime.logging import fields

logger = logging.getLogger(__name__)


AUTO_DECODE: Final = (DispatcherKind.NVLINK, DispatcherKind.DEEP_EP)
"""What is tried for decode, in this order. Dispatch and combine of 128 tokens on four H200 took
44 us by `NVLINK` and 111 by `DEEP_EP`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDispatcher:
    """A dispatcher, and how to close what it holds."""

    dispatcher: TokenDispatcher[Any]
    close: Callable[[], None] = lambda: None


Play = Callable[[Kernels, int], TokenDispatcher[Any]]
"""Makes a dispatcher from kernels and the number of experts of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExperts:
    """What a dispatcher is chosen for.

    Attributes:
        config: of the model.
        groups: the ranks.
        kernels: of the rank.
        device: of the rank.
        num_physical_experts: slots of all ranks together; 0 for one per expert.
        scatter_tokens: whether each tp rank has its own rows of a step.
        max_masked_tokens: most tokens of a step whose rows are laid out masked; 0 for none.
        waits: records who waits for whom; None for nobody.
    """

    config: DeepseekV3Config
    groups: ProcessGroups
    kernels: Kernels
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    num_physical_experts: int = 0
    scatter_tokens: bool = False
    max_masked_tokens: int = 0
    waits: WaitRecorder | None = None

    @property
    def num_slots(self) -> int:
        """P."""
        return self.num_physical_experts or self.config.n_routed_experts

    @property
    def share(self) -> ExpertShare:
        """Of this rank."""
        group = self.groups.ep_group
        num_local = self.num_slots // group.size
        return ExpertShare(
            first=group.rank * num_local, num_local=num_local, num_ranks=self.groups.dims.ep
        )

    @property
    def number_format(self) -> NumberFormat:
        """Of the experts' weights.

        Raises:
            ConfigError: the checkpoint quantises some experts only.
        """
        config, dims, formats = self.config, self.groups.dims, self.kernels.formats
        chosen = formats.of(config)
        width = config.moe_intermediate_size // (dims.tp if dims.ep == 1 else 1)
        shapes = ([width] * 2, config.hidden_size), ([config.hidden_size], width)
        is_held = not any(chosen.weights.why_not(*shape, whole=True) for shape in shapes)
        if chosen.is_quantized and is_held and experts_are_quantized(config):
            return chosen
        return formats.plain

    @property
    def are_quantized(self) -> bool:
        """Whether the experts' rows are quantised."""
        return self.number_format.rows is not None


def choose_dispatcher(
    experts: RankExperts,
    kind: DispatcherKind = DispatcherKind.AUTO,
    *,
    max_tokens_per_rank: int = 0,
    play: Play | None = None,
    num_sms: int = 20,
) -> OpenDispatcher:
    """Choose how tokens travel, and open what that needs; all ranks call.

    The first line that applies is taken. "Decode" is where `max_tokens_per_rank` is given: shapes
    are fixed, and a CUDA graph can hold them. On a CPU "auto" is "collectives".

    | layout            | experts | kind              | installed     | dispatcher               |
    |-------------------|---------|-------------------|---------------|--------------------------|
    | decode, played    | FP8     | any               |               | what `play` makes        |
    | decode, ep > 1    | FP8     | auto, nvlink      | Triton; GPUs  | `Nvlink`                 |
    |                   |         |                   | of one host   |                          |
    | decode, ep > 1    | FP8     | auto, deep-ep     | DeepEP        | `DeepEPLowLatency`       |
    | decode            | FP8     | auto, gathered    |               | `MaskedGathered`         |
    | dp = ep > 1       | FP8     | auto, deep-ep     | DeepEP        | `DeepEPNormal`           |
    | tp, scattered     | any     | auto, collectives |               | `Gathered`               |
    | dp = ep > 1       | any     | auto, collectives |               | `AllToAll`               |
    | rows are here     | any     | auto, collectives |               | `Local`                  |

    Libraries take some sizes only, and then do not count as installed. In the last three lines
    rows are `AlignedQuantized` or `PlainRows`, as the experts' number format says; with
    `max_masked_tokens` the first become `ShortQuantized`.

    Args:
        experts: of this rank.
        kind: what is asked for: by name it runs, or is refused.
        max_tokens_per_rank: of decode: most tokens that a rank ever brings to a step; else 0.
        play: for measurements: makes the dispatcher of a rank that plays one of many.
        num_sms: SMs that a transfer of `DeepEPNormal` takes.

    Raises:
        ConfigError: what was asked for does not run here, or experts are not FP8.
        PeerLostError: not all ranks came.
    """
    reason = _why_collectives(experts, kind)
    if reason:
        opened = _by_collectives(experts)
    elif max_tokens_per_rank and play is not None:
        reason = "one of many ranks is played"
        opened = OpenDispatcher(dispatcher=play(experts.kernels, experts.share.num_local))
    elif kind is DispatcherKind.AUTO and experts.device.type == "cpu":
        opened, reason = _by_collectives(experts), "the device is a CPU"
    elif max_tokens_per_rank:
        opened, reason = _open_decode(kind, experts, max_tokens_per_rank)
    else:
        opened, reason = _open_prefill(kind, experts, num_sms)
    name = type(opened.dispatcher).__name__
    logger.info("chose dispatcher %s", fields(name=name, wanted=kind, reason=reason))
    return opened


def _why_collectives(experts: RankExperts, kind: DispatcherKind) -> str:
    """Say why nothing else comes into question, if it is so.

    Raises:
        ConfigError: something else was asked for by name, and experts are not FP8.
    """
    if not experts.config.num_moe_layers:
        return "no layer has experts"
    if kind is DispatcherKind.COLLECTIVES:
        return "asked for"
    if experts.are_quantized:
        return ""
    if kind is DispatcherKind.AUTO:
        return "the experts' weights are not FP8"
    problem = "the experts' weights are not FP8 here"
    raise ConfigError("dispatcher", str(kind), problem, str(DispatcherKind.AUTO))


def _by_collectives(experts: RankExperts) -> OpenDispatcher:
    """Return the dispatcher that the process groups alone make possible."""
    groups, ops = experts.groups, experts.kernels.ops
    rows: RowFormat[Any] = choose_row_format(experts.number_format, ops, experts.share)
    if experts.max_masked_tokens and isinstance(rows, AlignedQuantized):
        rows = ShortQuantized(ops=ops, aligned=rows, max_tokens=experts.max_masked_tokens)
    dispatcher: TokenDispatcher[Any]
    if experts.scatter_tokens:
        dispatcher = GatheredDispatcher(rows, groups.tp_group)
    elif groups.dims.ep > 1 and groups.dims.tp == 1:
        waits = experts.waits if experts.device.type == "cpu" else None
        dispatcher = AllToAllDispatcher(rows, groups.ep_group, waits)
    else:
        summed_over = groups.tp_group if groups.dims.ep == 1 else groups.ep_group
        dispatcher = LocalDispatcher(rows, summed_over)
    return OpenDispatcher(dispatcher=dispatcher)


def _open_decode(
    kind: DispatcherKind, experts: RankExperts, max_tokens_per_rank: int
) -> tuple[OpenDispatcher, str]:
    """Open a dispatcher of fixed shapes; return it with the reason for it."""
    group = experts.groups.ep_group
    if kind is DispatcherKind.GATHERED or group.size == 1:
        reason = "the rank is alone" if group.size == 1 else "asked for"
    else:
        for candidate in AUTO_DECODE if kind is DispatcherKind.AUTO else (kind,):
            opened = _OPEN_DECODE[candidate](kind, experts, max_tokens_per_rank)
            if opened is not None:
                return opened, "the first that runs here"
        reason = "nothing else runs here"
    gathered = MaskedGatheredDispatcher(
        experts.kernels, experts.share.num_local, group, max_tokens_per_rank=max_tokens_per_rank
    )
    return OpenDispatcher(dispatcher=gathered), reason


def _open_prefill(
    kind: DispatcherKind, experts: RankExperts, num_sms: int
) -> tuple[OpenDispatcher, str]:
    """Open a dispatcher for many tokens; return it with the reason for it."""
    assert kind in (DispatcherKind.AUTO, DispatcherKind.DEEP_EP), kind
    if experts.groups.dims.dp == 1:
        return _by_collectives(experts), "no rank has tokens of its own"
    shape = NormalShape(
        num_ranks=experts.groups.ep_group.size,
        num_experts=experts.num_slots,
        hidden_size=experts.config.hidden_size,
        num_sms=num_sms,
    )
    if not _takes(kind, shape.check_library):
        return _by_collectives(experts), "nothing else runs here"
    buffer = deep_ep.open_normal_buffer(experts.groups.ep_group, shape)
    dispatcher = DeepEPNormalDispatcher(experts.kernels, buffer)
    return OpenDispatcher(dispatcher=dispatcher, close=buffer.close), "DeepEP is installed"


def _open_nvlink(
    kind: DispatcherKind, experts: RankExperts, max_tokens_per_rank: int
) -> OpenDispatcher | None:
    """Open an exchange; None where it does not run, unless it was asked for by name."""
    config, group = experts.config, experts.groups.ep_group
    try:
        shape = NvlinkShape(
            num_ranks=group.size,
            num_experts=experts.num_slots,
            max_tokens_per_rank=max_tokens_per_rank,
            hidden_size=config.hidden_size,
            top_k=config.num_experts_per_tok,
        )
        buffer = nvlink.open_nvlink_buffer(group, shape, records=experts.waits is not None)
    except ConfigError as error:
        if kind is DispatcherKind.NVLINK:
            raise
        logger.warning("tokens do not travel by NVLink stores reason=%s", error)
        return None
    if experts.waits is not None:
        experts.waits.device = buffer.waits
    dispatcher = NvlinkDispatcher(buffer)
    return OpenDispatcher(dispatcher=dispatcher, close=buffer.close)


def _open_deep_ep(
    kind: DispatcherKind, experts: RankExperts, max_tokens_per_rank: int
) -> OpenDispatcher | None:
    """Open a low-latency buffer; None where DeepEP does not run, unless it was asked for."""
    config, group = experts.config, experts.groups.ep_group
    shape = LowLatencyShape(
        num_ranks=group.size,
        num_experts=experts.num_slots,
        max_tokens_per_rank=max_tokens_per_rank,
        hidden_size=config.hidden_size,
    )
    top_k = config.num_experts_per_tok
    if not _takes(kind, lambda: shape.check_library(top_k)):
        return None
    waits = experts.waits
    buffer = deep_ep.open_low_latency_buffer(group, shape, top_k=top_k, records=waits is not None)
    if waits is not None:
        waits.device = buffer.costs
    return OpenDispatcher(dispatcher=DeepEPLowLatencyDispatcher(buffer), close=buffer.close)


_OPEN_DECODE: Final = {
    DispatcherKind.NVLINK: _open_nvlink,
    DispatcherKind.DEEP_EP: _open_deep_ep,
}


def _takes(kind: DispatcherKind, check: Callable[[], None]) -> bool:
    """Return whether DeepEP runs here with these sizes; refuse if it was asked for by name."""
    try:
        check()
        if not deep_ep.is_available():
            raise ConfigError(
                "dispatcher", str(kind), "DeepEP is not installed, or there is no GPU", "gathered"
            )
    except ConfigError as error:
        if kind is DispatcherKind.DEEP_EP:
            raise
        logger.warning("tokens do not travel by DeepEP reason=%s", error)
        return False
    return True
