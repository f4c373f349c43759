"""Opening DeepEP's buffers: the only place that knows the library.

A buffer is memory registered with all peers. It is opened once per process group and mode, by all
ranks together and before anything is captured in a CUDA graph, and closed by all together. What is
done with it stands in `deep_ep_buffers`.

Ranks of one host without RDMA devices need `NVSHMEM_REMOTE_TRANSPORT=none`, else the library's
network layer finds no transport and gives up; we set it, and say so in the log. Multicast is never
used. A complaint that the IBGDA transport failed to start is printed there, and harmless.
"""

import importlib
import importlib.util
import logging
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from engine.parallel.deep_ep_buffers import (
    LibraryBuffer,
    LowLatencyBuffer,
    NormalBuffer,
    NormalConfigs,
    peers_alive,
)
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.deep_ep_waits import WaitCosts
from engine.parallel.groups import RankGroup
from runtime.errors import ConfigError

logger = logging.getLogger(__name__)

ONE_HOST_ENVIRONMENT: Final[Mapping[str, str]] = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""For ranks of one host without RDMA devices."""

RDMA_DEVICES: Final = Path("/sys/class/infiniband")


def is_available() -> bool:
    """Return whether the library is installed and there is a GPU for it."""
    return importlib.util.find_spec("deep_ep") is not None and torch.cuda.is_available()


def prepare_environment(environment: MutableMapping[str, str], shape: LowLatencyShape) -> None:
    """Set what the library's network layer reads when a buffer is opened; what is set is kept.

    Args:
        environment: of this process.
        shape: decides the depth of the network queues, and whether the ranks may share a host.
    """
    wanted = {"NVSHMEM_QP_DEPTH": str(shape.queue_depth)}
    if shape.num_ranks <= 8 and not _has_rdma_devices():
        wanted |= ONE_HOST_ENVIRONMENT
    for name, value in wanted.items():
        environment.setdefault(name, value)
    logger.info("prepared DeepEP %s", " ".join(f"{name}={environment[name]}" for name in wanted))
    if int(environment["NVSHMEM_QP_DEPTH"]) < shape.queue_depth:
        raise ConfigError(
            "NVSHMEM_QP_DEPTH",
            environment["NVSHMEM_QP_DEPTH"],
            f"too shallow for {shape.max_tokens_per_rank} tokens per rank",
            f"unset it, or {shape.queue_depth}",
        )


def open_normal_buffer(group: RankGroup, shape: NormalShape) -> NormalBuffer:
    """Open the buffer of a process group on this rank's current GPU; all ranks call.

    Raises:
        ConfigError: the library is not there, or does not take these sizes.
        PeerLostError: not all ranks came, or a GPU cannot reach another.
    """
    shape.check_library()
    library = _load()
    kind = library.Buffer
    kind.set_num_sms(shape.num_sms)
    dispatch, combine = (
        choose(shape.num_ranks) for choose in (kind.get_dispatch_config, kind.get_combine_config)
    )
    num_bytes = max(
        config.get_nvl_buffer_size_hint(2 * shape.hidden_size, shape.num_ranks)
        for config in (dispatch, combine)
    )
    with peers_alive("opening a normal buffer"):
        buffer: LibraryBuffer = kind(
            group.process_group, num_nvl_bytes=num_bytes, explicitly_destroy=True
        )
    logger.info(
        "opened DeepEP mode=normal ranks=%d sms=%d bytes=%d",
        shape.num_ranks,
        shape.num_sms,
        num_bytes,
    )
    return NormalBuffer(buffer, shape, NormalConfigs(dispatch=dispatch, combine=combine))


def open_low_latency_buffer(
    group: RankGroup, shape: LowLatencyShape, *, top_k: int, records: bool = False
) -> LowLatencyBuffer:
    """Open the buffer of a process group on this rank's current GPU; all ranks call.

    Args:
        group: all ranks of the instance.
        shape: equal on all ranks.
        top_k: experts per token.
        records: whether the kernels count how long they wait for whom.

    Raises:
        ConfigError: the library is not there, or does not take these sizes.
        PeerLostError: not all ranks came, or a GPU cannot reach another.
    """
    shape.check_library(top_k)
    library = _load()
    prepare_environment(os.environ, shape)
    num_bytes = library.Buffer.get_low_latency_rdma_size_hint(
        shape.max_tokens_per_rank, shape.hidden_size, shape.num_ranks, shape.num_experts
    )
    with peers_alive("opening a low-latency buffer"):
        buffer: LibraryBuffer = library.Buffer(
            group.process_group,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=shape.num_local_experts,
            allow_nvlink_for_low_latency_mode=True,
            explicitly_destroy=True,
        )
    logger.info(
        "opened DeepEP mode=low-latency ranks=%d experts=%d tokens=%d bytes=%d",
        shape.num_ranks,
        shape.num_experts,
        shape.max_tokens_per_rank,
        num_bytes,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    costs = WaitCosts(shape.num_ranks, shape.num_local_experts, device) if records else None
    return LowLatencyBuffer(buffer, shape, costs)


def _load() -> ModuleType:
    if not is_available():
        raise ConfigError(
            "dispatcher", "deep_ep", "not installed, or no GPU", "the gpu extra on a Hopper GPU"
        )
    return importlib.import_module("deep_ep")


def _has_rdma_devices() -> bool:
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
