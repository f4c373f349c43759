"""Opening an exchange: whether it runs here, and the memory of a GPU that its peers have mapped.

The only place that allocates such memory. Every rank allocates as much; each then sees all of it
under addresses of its own. Multicast is never used.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from engine.parallel.groups import RankGroup
from engine.parallel.nvlink.all_gather import GatherKernels, GatherShape, Lane, NvlinkAllGather
from engine.parallel.nvlink.buffer import NvlinkBuffer
from engine.parallel.nvlink.records import RingReader
from engine.parallel.nvlink.reduce_scatter import NvlinkReduceScatter, ReduceShape
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.nvlink.window import WAIT_SECONDS, Window
from runtime.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """One rank's view.

    Attributes:
        buffer: of this rank, uint8.
        addresses: of each rank's buffer, as this GPU sees it.
        handle: of the library, opaque; the mapping lasts as long as it.
    """

    buffer: Tensor
    addresses: list[int]
    handle: object


def map_peer_memory(
    group: RankGroup, device: torch.device, num_bytes: int, *, num_zeros: int
) -> PeerMemory | None:
    """Allocate memory on every rank and let the ranks map each other's; all ranks call.

    Args:
        group: the ranks; each has a GPU.
        device: of this rank.
        num_bytes: the same on all ranks.
        num_zeros: first bytes that are zero on all ranks when this returns.

    Returns:
        None where the ranks cannot reach each other's memory: one rank, no GPU, several hosts, or
        GPUs that have no way to one another.
    """
    if group.size == 1 or device.type != "cuda" or not is_on_one_host(group):
        return None
    if not _all_say(group, _reaches_peers(device)):
        return None
    assert group.process_group is not None
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if symm_mem.get_backend(device) != "CUDA":
        symm_mem.set_backend("CUDA")  # refused where it already is the default
    if torch.cuda.device_count() == 1:
        # Each rank sees its own GPU only and calls it 0; torch would take them for one GPU.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    with torch.cuda.device(device):
        buffer = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        handle = symm_mem.rendezvous(buffer, group.process_group)
        buffer[:num_zeros].zero_()
        torch.cuda.synchronize()
    group.barrier()  # No peer may signal before the zeros are there.
    return PeerMemory(buffer=buffer, addresses=list(handle.buffer_ptrs), handle=handle)


def is_on_one_host(group: RankGroup) -> bool:
    """Return whether all ranks of the group run on the same host; all ranks call."""
    own = torch.tensor([zlib.crc32(socket.gethostname().encode())], dtype=torch.int64)
    return bool((group.all_gather(own) == own).all())


def _reaches_peers(device: torch.device) -> bool:
    """Return whether a GPU can map the memory of all others that this process sees."""
    own = device.index or 0
    others = (peer for peer in range(torch.cuda.device_count()) if peer != own)
    return all(torch.cuda.can_device_access_peer(own, peer) for peer in others)


def _all_say(group: RankGroup, answer: bool) -> bool:
    """Return whether all ranks say yes; all call."""
    return bool(group.all_gather(torch.tensor([answer], dtype=torch.int64)).all())


def is_available() -> bool:
    """Return whether there are a GPU and Triton."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.is_available()


def open_nvlink_buffer(
    group: RankGroup,
    shape: NvlinkShape,
    *,
    wait_seconds: int = WAIT_SECONDS,
    records: bool = False,
) -> NvlinkBuffer:
    """Open the buffer of a group on this rank's current GPU; all ranks call.

    Args:
        group: all ranks of the instance.
        shape: equal on all ranks.
        wait_seconds: see `Window`.
        records: whether transfers are recorded.

    Raises:
        ConfigError: the ranks cannot reach each other's memory.
    """
    memory, close = _map(group, shape, _refuse_dispatcher)
    window = Window.open(
        shape,
        group.rank,
        memory.addresses,
        memory.buffer.device,
        wait_seconds=wait_seconds,
        records=records,
    )
    logger.info(
        "opened NVLink exchange ranks=%d experts=%d tokens=%d bytes=%d records=%s",
        shape.num_ranks,
        shape.num_experts,
        shape.max_tokens_per_rank,
        shape.buffer_bytes,
        records,
    )
    exchange = importlib.import_module("engine.parallel.nvlink.triton_exchange")
    reader = None if window.ring is None else RingReader(window.ring, group.rank)
    return NvlinkBuffer(shape, exchange.TritonExchange(window), close, waits=reader)


def open_nvlink_exchange(
    group: RankGroup, sums: ReduceShape, gathers: GatherShape, *, wait_seconds: int = WAIT_SECONDS
) -> tuple[NvlinkReduceScatter, NvlinkAllGather]:
    """Open the sums and gathers of a group on this rank's current GPU; all ranks call.

    Args:
        group: the ranks that share heads.
        sums: equal on all ranks.
        gathers: equal on all ranks.
        wait_seconds: see `Window`.

    Raises:
        ConfigError: the ranks cannot reach each other's memory.
    """
    summing, close_sums = _map(group, sums, _refuse_exchange)
    window = Window.open(
        sums, group.rank, summing.addresses, summing.buffer.device, wait_seconds=wait_seconds
    )
    gathering, close_gathers = _map(group, gathers, _refuse_exchange)
    kernels = importlib.import_module("engine.parallel.nvlink.share_kernels")

    def open_lane(lane: Lane) -> GatherKernels:
        addresses = [address + lane.counters for address in gathering.addresses]
        buffer = gathering.buffer
        part = Window.open(gathers, group.rank, addresses, buffer.device, wait_seconds=wait_seconds)
        made: GatherKernels = kernels.TritonLane(part, lane, buffer)
        return made

    logger.info(
        "opened NVLink sums and gathers ranks=%d rows=%d bytes=%d",
        sums.num_ranks,
        sums.max_rows,
        sums.buffer_bytes + gathers.buffer_bytes,
    )
    return (
        NvlinkReduceScatter(sums, kernels.TritonSums(window), close_sums),
        NvlinkAllGather(gathers, open_lane, close_gathers),
    )


def _map(
    group: RankGroup,
    shape: NvlinkShape | ReduceShape | GatherShape,
    refuse: Callable[[str], ConfigError],
) -> tuple[PeerMemory, Callable[[], None]]:
    """Return memory that all ranks have mapped, and what gives it back, all ranks together."""
    if not is_available():
        raise refuse("there is no GPU, or no Triton")
    device = torch.device("cuda", torch.cuda.current_device())
    memory = map_peer_memory(group, device, shape.buffer_bytes, num_zeros=shape.halves)
    if memory is None:
        raise refuse("the ranks cannot reach each other's memory")
    held = [memory]

    def close() -> None:
        torch.cuda.synchronize(device)
        group.barrier()
        held.clear()

    return memory, close


def _refuse_dispatcher(problem: str) -> ConfigError:
    return ConfigError("dispatcher", "nvlink", problem, "gathered, or deep-ep")


def _refuse_exchange(problem: str) -> ConfigError:
    return ConfigError("tp_exchange", "nvlink", problem, '"auto" or "collectives"')
