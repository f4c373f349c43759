"""The ``mooncake`` transport's engine: Mooncake's TransferEngine without a metadata server.

The only file that imports it.

Its non-blocking calls cannot be polled safely from Python for more than one write (a batch's status
is that of its first write, or a call that spins), so each post is one blocking batch on a thread of
the engine, with the GIL released. A batch that failed, above all one that timed out, may still be
written later by the library's own threads; so the first error ends the connection, and the engine,
which owns those threads and sockets, is destroyed before anybody is told.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any

from kv_transfer.transport import MemoryRegion
from kv_transfer.transports.paired.engine import EngineError, EnginePost, EngineWrite
from runtime.errors import ConfigError

PROTOCOLS = ("tcp", "rdma", "nvlink")
_ENVIRONMENT = {
    # Seconds until a batch is given up, which is also the longest time that close may take.
    "MC_TRANSFER_TIMEOUT": "10",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "5",
    # One connection per peer instead of one per write: no port is used up.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
}
_NUM_THREADS = 2


def load_mooncake() -> ModuleType:
    """Mooncake's engine module. Sets its environment where it is not set.

    Raises:
        ConfigError: it is not installed, or a system library is missing; says what to install.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        fix = "pip install 'tandem-serve[mooncake]', or another transport"
        if ".so" in str(error) and "libcuda" in str(error):
            fix = (
                "the build for this machine's CUDA: mooncake-transfer-engine-non-cuda without a GPU"
            )
        elif ".so" in str(error):
            fix = "its system libraries; on Debian: apt-get install libibverbs1 libnuma1 libcurl4"
        raise ConfigError(
            "kv_transfer.transport", "mooncake", f"Mooncake does not load ({error})", fix
        ) from error


class MooncakeFactory:
    """Makes engines that reach peers by ``protocol``, over the network cards ``devices`` (a comma
    list, empty is all).
    """

    def __init__(self, *, host: str, protocol: str = "tcp", devices: str = "") -> None:
        if protocol not in PROTOCOLS:
            raise ConfigError(
                "kv_transfer.mooncake_protocol",
                protocol,
                "unknown value",
                f"one of {', '.join(PROTOCOLS)}",
            )
        self._module = load_mooncake()
        self._host = host
        self._protocol = protocol
        self._devices = devices

    @property
    def library(self) -> str:
        """Both ends need the same protocol."""
        return f"mooncake/{self._protocol}"

    @property
    def bypasses_receiver(self) -> bool:
        """Over NVLink the sender maps the receiver's memory. TCP writes are done by the receiver's
        engine, RDMA's by its network card under keys that go with the engine.
        """
        return self._protocol == "nvlink"

    def create(self, name: str) -> MooncakeEngine:
        """A new engine; it listens on ports of its own."""
        engine = self._module.TransferEngine()
        status = engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, self._devices)
        if status != 0:
            raise EngineError(
                f"Mooncake does not start with protocol {self._protocol!r} and devices "
                f"{self._devices!r}: status {status}"
            )
        return MooncakeEngine(engine, self._host, name)


class MooncakeEngine:
    """See ``WriteEngine``."""

    def __init__(self, engine: Any, host: str, name: str) -> None:
        self._engine = engine
        self._host = host
        self._target = ""
        self._regions: dict[str, MemoryRegion] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix=f"mooncake-{name}")

    def register(self, region: MemoryRegion) -> None:
        """In its batch form, which releases the GIL."""
        location = "cpu:0" if region.device is None else f"cuda:{region.device}"
        self._check(
            self._engine.batch_register_memory([region.address], [region.nbytes], location),
            f"register {region.label}",
        )
        self._regions[region.label] = region

    def deregister(self, region: MemoryRegion) -> None:
        """Undo ``register``."""
        if self._regions.pop(region.label, None) is not None:
            self._check(
                self._engine.batch_unregister_memory([region.address]),
                f"deregister {region.label}",
            )

    def address(self) -> bytes:
        """Host and port of the engine's own handshake."""
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def attach(self, address: bytes) -> None:
        """Remember the peer and ask whether it answers."""
        target = address.decode()
        self._check(self._engine.send_probe(target), f"probe of {target}")
        self._target = target

    def start(self, writes: Sequence[EngineWrite]) -> EnginePost:
        """Hand a batch to one of the threads."""
        return self._threads.submit(
            self._engine.batch_transfer_sync_write,
            self._target,
            [write.src_address for write in writes],
            [write.dst_address for write in writes],
            [write.nbytes for write in writes],
        )

    def poll(self, post: EnginePost) -> bool:
        """Whether the batch's thread is done with it."""
        assert isinstance(post, Future)
        if not post.done():
            return False
        try:
            status = post.result()
        except Exception as error:
            raise EngineError(f"Mooncake write: {error!r}") from error
        self._check(status, f"write to {self._target}")
        return True

    def release(self, post: EnginePost) -> None:
        """Nothing is held for a complete batch."""

    def close(self) -> None:
        """Wait for the batches (they end by timeout), then destroy the engine."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for region in self._regions.values():
            engine.batch_unregister_memory([region.address])
        self._regions.clear()
        del engine  # the only reference: this runs its destructor, which joins its threads

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status != 0:
            raise EngineError(f"Mooncake {what}: status {status}")
