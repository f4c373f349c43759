"""All checks of a host in one list: by hand with `tandem doctor`, and what matters at a start."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from runtime.config import ClusterConfig
from runtime.doctor.finding import Finding, Verdict
from runtime.doctor.gpus import check_driver, check_gpus, read_gpus, visible_gpus
from runtime.doctor.libraries import check_libraries, cuda_major, gpu_pins
from runtime.doctor.limits import OPEN_FILES_OF_RANK, check_host, check_limits, read_limits
from runtime.doctor.network import check_free_ports, check_name
from runtime.doctor.pairing import check_pairing
from runtime.doctor.rdma import check_ports, read_nics
from runtime.errors import ConfigError

ROOT = Path("/")
_OTHER_FILES = 1024
"""Of a router, beside the connections of its clients."""


def wants_gpus(config: ClusterConfig) -> bool:
    """Whether any role is to run on one."""
    return "cuda" in (config.prefill.device, config.decode.device)


def examine(
    config: ClusterConfig,
    *,
    root: Path = ROOT,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """Everything that can be found in a second or two, for a host that is to serve ``config``."""
    gpus, nics = read_gpus(root), read_nics(root)
    pins = gpu_pins()
    yield from check_host(root, os.cpu_count() or 1)
    yield from check_gpus(root, gpus, wanted=wants_gpus(config))
    if gpus:
        yield from check_driver(root, cuda_major(pins))
        yield from check_libraries(pins)
    yield from check_ports(nics)
    yield from check_pairing(visible_gpus(gpus, environment), nics, environment)
    num_files = max(config.router.max_connections + _OTHER_FILES, OPEN_FILES_OF_RANK)
    limits = read_limits(root)
    yield from check_limits(limits, num_files=num_files, has_rdma=bool(nics), has_gpus=bool(gpus))
    yield from check_name(config, socket.gethostname())
    yield from check_free_ports(config)


def examine_at_start(
    role: str,
    device: str,
    *,
    root: Path = ROOT,
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """What is wrong for a rank of ``role`` on ``device`` ("cpu" or "cuda"); a few files are read.

    Raises:
        ConfigError: the rank cannot serve here.
    """
    if device != "cuda":
        return []
    gpus, nics = read_gpus(root), read_nics(root)
    visible = visible_gpus(gpus, environment)
    pins = gpu_pins()
    found = [
        *check_gpus(root, gpus, wanted=True),
        *check_driver(root, cuda_major(pins)),
        *check_libraries(pins),
        *check_ports(nics),
        *check_pairing(visible, nics, environment),
        *check_limits(
            read_limits(root), num_files=OPEN_FILES_OF_RANK, has_rdma=bool(nics), has_gpus=True
        ),
    ]
    for finding in found:
        if finding.verdict is Verdict.ERROR:
            raise ConfigError(f"{role}.device", device, finding.text, finding.fix)
    return [finding for finding in found if finding.is_wrong]
