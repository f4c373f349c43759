"""Opening an exchange: whether it runs here, and the memory that the ranks map."""

from __future__ import annotations

import importlib
import importlib.util
import logging

import torch

from engine.parallel.groups import RankGroup
from engine.parallel.nvlink.buffer import NvlinkBuffer
from engine.parallel.nvlink.peer_memory import map_peer_memory
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.nvlink.window import WAIT_SECONDS, Window
from runtime.errors import ConfigError

logger = logging.getLogger(__name__)


def is_available() -> bool:
    """Return whether there are a GPU and Triton."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.is_available()


def open_nvlink_buffer(
    group: RankGroup, shape: NvlinkShape, *, wait_seconds: int = WAIT_SECONDS
) -> NvlinkBuffer:
    """Open the buffer of a group on this rank's current GPU; all ranks call.

    Args:
        group: all ranks of the instance.
        shape: equal on all ranks.
        wait_seconds: see `Window`.

    Raises:
        ConfigError: the ranks cannot reach each other's memory.
    """
    if not is_available():
        raise _refusal("there is no GPU, or no Triton")
    device = torch.device("cuda", torch.cuda.current_device())
    memory = map_peer_memory(group, device, shape.buffer_bytes, num_zeros=shape.halves)
    if memory is None:
        raise _refusal("the ranks cannot reach each other's memory")
    window = Window.open(shape, group.rank, memory.addresses, device, wait_seconds=wait_seconds)
    logger.info(
        "opened NVLink exchange ranks=%d experts=%d tokens=%d bytes=%d",
        shape.num_ranks,
        shape.num_experts,
        shape.max_tokens_per_rank,
        shape.buffer_bytes,
    )
    held = [memory]

    def close() -> None:
        torch.cuda.synchronize(device)
        group.barrier()
        held.clear()

    exchange = importlib.import_module("engine.parallel.nvlink.triton_exchange")
    return NvlinkBuffer(shape, exchange.TritonExchange(window), close)


def _refusal(problem: str) -> ConfigError:
    return ConfigError("dispatcher", "nvlink", problem, "gathered, or deep-ep")
