"""Dispatchers that hold something open, and their choice by what runs here, or by name.

For ranks with their own tokens and FP8 experts; other axes need nothing opened, and
`create_dispatcher` serves them. Whoever opens one gives it to the model (`Execution.dispatcher`)
and closes it, all ranks together, after the last step and before the process groups.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from engine.config import ModelConfig
from engine.kernels.base import Kernels
from engine.kernels.fp8_rows import GROUP
from engine.parallel import deep_ep
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_normal_dispatcher import DeepEPNormalDispatcher
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.groups import ProcessGroups
from engine.parallel.loopback_masked_dispatcher import LoopbackMaskedDispatcher
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.nvlink import open as nvlink
from engine.parallel.nvlink.dispatcher import NvlinkDispatcher
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.token_dispatcher import TokenDispatcher
from engine.weights.expert_format import experts_are_quantized
from runtime.errors import ConfigError

logger = logging.getLogger(__name__)


class DispatcherKind(StrEnum):
    """How tokens travel to experts: by stores over NVLink, DeepEP, gathered, or not at all.

    `AUTO` is the first of `AUTO_DECODE` (in prefill: DeepEP) that is installed and takes the sizes,
    and gathered elsewhere. `NVLINK` is for decode, `LOOPBACK` for measurements: one rank plays one
    of many.
    """

    AUTO = "auto"
    NVLINK = "nvlink"
    DEEP_EP = "deep-ep"
    GATHERED = "gathered"
    LOOPBACK = "loopback"


AUTO_DECODE: Final = (DispatcherKind.NVLINK, DispatcherKind.DEEP_EP)
"""What is tried for decode, in this order. Dispatch and combine of 128 tokens on four H200 took
44 us by `NVLINK` and 111 by `DEEP_EP`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDispatcher:
    """A dispatcher, and how to close what it holds."""

    dispatcher: TokenDispatcher[Any]
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExperts:
    """What a dispatcher is opened for.

    Attributes:
        config: of the model.
        groups: the ranks, dp > 1 and ep > 1.
        kernels: of the rank, with FP8.
        num_physical_experts: slots of all ranks together; 0 for one per expert.
    """

    config: ModelConfig
    groups: ProcessGroups
    kernels: Kernels
    num_physical_experts: int = 0

    @property
    def num_slots(self) -> int:
        """P."""
        return self.num_physical_experts or self.config.n_routed_experts

    @property
    def are_fp8(self) -> bool:
        """Whether the experts' rows are FP8, as every dispatcher here wants them."""
        config = self.config
        sizes = (config.hidden_size, config.moe_intermediate_size)
        is_stored = config.fp8_block_size == GROUP and not any(size % GROUP for size in sizes)
        return self.kernels.has_fp8 and is_stored and experts_are_quantized(config)


def open_decode_dispatcher(
    kind: DispatcherKind,
    experts: RankExperts,
    *,
    max_tokens_per_rank: int,
    played_ranks: int = 0,
) -> OpenDispatcher | None:
    """Open a dispatcher of fixed shapes, which a CUDA graph can hold; all ranks call.

    Args:
        kind: of the dispatcher.
        experts: of this rank.
        max_tokens_per_rank: that a rank ever brings to a step, drafts included.
        played_ranks: of which `LOOPBACK` plays one.

    Returns:
        None where experts are not FP8 and `kind` is `AUTO`: the dispatcher that fits the axes.

    Raises:
        ConfigError: what was asked for does not run here, or experts are not FP8.
        PeerLostError: not all ranks came.
    """
    if not _is_possible(kind, experts):
        return None
    group = experts.groups.ep_group
    share = experts.num_slots // group.size
    if kind is DispatcherKind.LOOPBACK:
        loopback = LoopbackMaskedDispatcher(experts.kernels, share, played_ranks)
        return OpenDispatcher(dispatcher=loopback)
    tried = AUTO_DECODE if kind is DispatcherKind.AUTO else (kind,)
    if group.size > 1 and kind is not DispatcherKind.GATHERED:
        for candidate in tried:
            opened = _OPEN_DECODE[candidate](kind, experts, max_tokens_per_rank)
            if opened is not None:
                return opened
    gathered = MaskedGatheredDispatcher(
        experts.kernels, share, group, max_tokens_per_rank=max_tokens_per_rank
    )
    return OpenDispatcher(dispatcher=gathered)


def open_prefill_dispatcher(
    kind: DispatcherKind, experts: RankExperts, *, num_sms: int = 20
) -> OpenDispatcher | None:
    """Open a dispatcher for many tokens; all ranks call.

    Args:
        kind: `AUTO` or `DEEP_EP`.
        experts: of this rank.
        num_sms: multiprocessors that a transfer takes.

    Returns:
        None where DeepEP does not run and `kind` is `AUTO`: the dispatcher that fits the axes.

    Raises:
        ConfigError: DeepEP was asked for and does not run here, or experts are not FP8.
        PeerLostError: not all ranks came.
    """
    assert kind in (DispatcherKind.AUTO, DispatcherKind.DEEP_EP), kind
    if not _is_possible(kind, experts):
        return None
    shape = NormalShape(
        num_ranks=experts.groups.ep_group.size,
        num_experts=experts.num_slots,
        hidden_size=experts.config.hidden_size,
        num_sms=num_sms,
    )
    if not _takes(kind, shape.check_library):
        return None
    buffer = deep_ep.open_normal_buffer(experts.groups.ep_group, shape)
    return OpenDispatcher(
        dispatcher=DeepEPNormalDispatcher(experts.kernels, buffer), close=buffer.close
    )


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
        buffer = nvlink.open_nvlink_buffer(group, shape)
    except ConfigError as error:
        if kind is DispatcherKind.NVLINK:
            raise
        logger.warning("tokens do not travel by NVLink stores reason=%s", error)
        return None
    dispatcher = NvlinkDispatcher(experts.kernels, buffer)
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
    buffer = deep_ep.open_low_latency_buffer(group, shape, top_k=top_k)
    return OpenDispatcher(dispatcher=DeepEPLowLatencyDispatcher(buffer), close=buffer.close)


_OPEN_DECODE: Final = {
    DispatcherKind.NVLINK: _open_nvlink,
    DispatcherKind.DEEP_EP: _open_deep_ep,
}


def _is_possible(kind: DispatcherKind, experts: RankExperts) -> bool:
    """Return whether the experts suit; refuse what was asked for by name and does not."""
    if experts.are_fp8:
        return True
    if kind is not DispatcherKind.AUTO:
        raise ConfigError(
            "dispatcher",
            str(kind),
            "the experts' weights are not FP8 here",
            str(DispatcherKind.AUTO),
        )
    return False


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
