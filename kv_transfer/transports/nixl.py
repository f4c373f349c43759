"""The ``nixl`` transport's engine: an agent of NVIDIA's NIXL with its UCX backend. The only file
that imports it.

UCX picks the path per peer: RDMA between hosts, NVLink (CUDA IPC) between GPUs of one host, shared
memory or cross-memory attach (CMA) between processes of one host, else TCP. Over CMA, ``start``
copies the bytes itself. An agent is used under the lock of its connection, in sync mode STRICT, and
never sees a second peer; its ``rails`` are further agents that share the writes.

The sending end has no progress thread: our polls make progress, and a thread that waits for events
beside them puts callbacks between the copies of a GPU (141 instead of 305 GB/s between two H200s).

Not used, on purpose: NIXL's notifications (hints without a sender that is proven; ours go over the
control socket), its metadata listener, and serialized descriptors (they are pickle).
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kv_transfer.transport import MemoryRegion
from kv_transfer.transports.paired.engine import EngineError, EnginePost, EngineWrite
from runtime.errors import ConfigError

_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_ENVIRONMENT = {
    # UCX must not patch malloc and mmap of a process that is not its own.
    "UCX_MEM_MMAP_HOOK_MODE": "none",
    "UCX_MEM_MALLOC_HOOKS": "n",
    # Without a bound the registration cache grows for as long as the process lives.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # Python's own handlers stay (UCX would print a backtrace and wait for a debugger).
    "UCX_HANDLE_ERRORS": "none",
    "UCX_ERROR_SIGNALS": "",
    "NIXL_LOG_LEVEL": "ERROR",
}
_LOOPBACK_ENVIRONMENT = {
    # By itself UCX listens on the host's other addresses too, whatever address is asked for.
    "UCX_NET_DEVICES": "lo",
}
_CARDS = Path("/sys/class/infiniband")
_CARDLESS_ENVIRONMENT = {
    # Where libibverbs is installed and no card is there, UCX's module for cards crashes at the exit
    # of a process that has a live agent.
    "UCX_MODULES": "^ib",
}
_DRAIN_S = 2.0
_DRAIN_POLL_S = 5e-4
_PROGRESS_DELAY_US = 1000
"""Longest sleep of a progress thread; events wake it earlier."""


def is_installed() -> bool:
    """Whether there is a NIXL to load; loads nothing."""
    packages = (name.partition(".")[0] for name in _MODULES)
    return any(importlib.util.find_spec(package) is not None for package in packages)


def load_nixl() -> ModuleType:
    """NIXL's Python interface. Sets UCX's environment where it is not set.

    Raises:
        ConfigError: it is not installed, or does not load; says what to install.
    """
    has_cards = _CARDS.is_dir() and any(_CARDS.iterdir())
    for name, value in (_ENVIRONMENT | ({} if has_cards else _CARDLESS_ENVIRONMENT)).items():
        os.environ.setdefault(name, value)
    problems = []
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name}: {error}")
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)
        _let_progress_threads_sleep(module)
        return module
    raise ConfigError(
        "kv_transfer.transport",
        "nixl",
        f"NIXL does not load ({'; '.join(problems)})",
        "pip install 'tandem-serve[nixl]', or another transport",
    )


def _let_progress_threads_sleep(api: ModuleType) -> None:
    """Make agents created from now on wait for events in their progress thread.

    NIXL's Python interface fixes the thread's delay at 0, with which it spins: a core per agent,
    also when nothing moves. With any other delay it sleeps until UCX has an event, at most so long.
    """
    bindings = sys.modules[api.nixl_agent.__module__].nixlBind
    create = bindings.nixlAgent
    if getattr(create, "sleeps", False):
        return

    def create_sleeping(name: str, config: Any) -> Any:
        config.pthrDelay = _PROGRESS_DELAY_US
        return create(name, config)

    create_sleeping.sleeps = True  # type: ignore[attr-defined]
    bindings.nixlAgent = create_sleeping


class NixlFactory:
    """Makes agents. ``rails``: agents per connection on the sending end. ``is_local``: only
    processes of this machine are peers, so no network card is used, nor listened on.
    """

    bypasses_receiver = True
    """CMA and CUDA IPC write without the receiver's process."""

    def __init__(self, *, rails: int = 1, is_local: bool = False) -> None:
        if rails < 1:
            raise ConfigError("kv_transfer.nixl_rails", rails, "is below 1", "1 or more")
        for name, value in _LOOPBACK_ENVIRONMENT.items() if is_local else ():
            os.environ.setdefault(name, value)
        self._api = load_nixl()
        self._rails = rails

    @property
    def library(self) -> str:
        """Both ends need NIXL, whatever their rails."""
        return "nixl"

    def create(self, name: str) -> NixlEngine:
        """A new engine; its agents start with first use."""
        return NixlEngine(self._api, name, self._rails)


class NixlEngine:
    """See ``WriteEngine``. The first agent also serves the receiving end."""

    def __init__(self, api: ModuleType, name: str, num_rails: int) -> None:
        self._api = api
        self._name = name
        self._num_rails = num_rails
        self._rails: list[_Rail] = []
        self._regions: dict[str, MemoryRegion] = {}
        self._posts: list[_NixlPost] = []

    def register(self, region: MemoryRegion) -> None:
        """Register ``region`` with every agent that exists, and with those to come."""
        _use_device(region.device)
        self._regions[region.label] = region
        for rail in self._rails:
            rail.register(region)

    def deregister(self, region: MemoryRegion) -> None:
        """Undo ``register``."""
        self._regions.pop(region.label, None)
        for rail in self._rails:
            rail.deregister(region.label)

    def address(self) -> bytes:
        """The agent's metadata: how to reach it, and keys of all registered memory."""
        self._grow(1, progress_thread=True)
        return self._rails[0].metadata()

    def attach(self, address: bytes) -> None:
        """Load the peer's metadata into every rail and open its connections."""
        self._grow(self._num_rails, progress_thread=False)
        for rail in self._rails:
            rail.attach(address)

    def start(self, writes: Sequence[EngineWrite]) -> EnginePost:
        """One request per rail and pair of memory types."""
        groups: dict[tuple[bool, bool], list[EngineWrite]] = {}
        for write in writes:
            key = (write.src_device is None, write.dst_device is None)
            groups.setdefault(key, []).append(write)
        post = _NixlPost()
        self._posts.append(post)  # before the first request, so that close drains it
        for group in groups.values():
            _use_device(group[0].src_device)
            for index, rail in enumerate(self._rails):
                share = group[index :: len(self._rails)]
                if share:
                    rail.start(share, post)
        return post

    def poll(self, post: EnginePost) -> bool:
        """Ask for each request that is not complete."""
        assert isinstance(post, _NixlPost)
        post.requests = [(rail, r) for rail, r in post.requests if not rail.is_done(r)]
        return not post.requests

    def release(self, post: EnginePost) -> None:
        """Its requests were released one by one."""
        assert isinstance(post, _NixlPost)
        self._posts.remove(post)

    def close(self) -> None:
        """Let copies that cannot be aborted end, abort the rest, destroy the agents."""
        deadline = time.monotonic() + _DRAIN_S
        while self._posts and time.monotonic() < deadline:
            self._posts = [post for post in self._posts if not self._is_over(post)]
            if self._posts:
                time.sleep(_DRAIN_POLL_S)
        for post in self._posts:
            for rail, request in post.requests:
                rail.abort(request)
            post.requests.clear()  # a request keeps its agent alive
        self._posts.clear()
        while self._rails:
            self._rails.pop().close()

    def _is_over(self, post: _NixlPost) -> bool:
        try:
            return self.poll(post)
        except EngineError:
            return True

    def _grow(self, num_rails: int, *, progress_thread: bool) -> None:
        for index in range(len(self._rails), num_rails):
            rail = _Rail(self._api, f"{self._name}.{index}", progress_thread=progress_thread)
            self._rails.append(rail)
            for region in self._regions.values():
                _use_device(region.device)
                rail.register(region)


class _NixlPost:
    """Requests that are not complete yet."""

    def __init__(self) -> None:
        self.requests: list[tuple[_Rail, Any]] = []


class _Rail:
    """One agent; every call of the library is here, and every exception of it becomes ours."""

    def __init__(self, api: ModuleType, name: str, *, progress_thread: bool) -> None:
        config = api.nixl_agent_config(
            enable_prog_thread=progress_thread,
            backends=["UCX"],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._agent: Any = _mapped(api.nixl_agent, name, config)
        self._registered: dict[str, Any] = {}
        self._peer = ""

    def register(self, region: MemoryRegion) -> None:
        descriptor = [(region.address, region.nbytes, region.device or 0, "")]
        kind = _memory_type(region.device)
        self._registered[region.label] = _mapped(self._agent.register_memory, descriptor, kind)

    def deregister(self, label: str) -> None:
        descriptors = self._registered.pop(label, None)
        if descriptors is not None:
            _mapped(self._agent.deregister_memory, descriptors)

    def metadata(self) -> bytes:
        return bytes(_mapped(self._agent.get_agent_metadata))

    def attach(self, address: bytes) -> None:
        name = _mapped(self._agent.add_remote_agent, address)
        self._peer = name.decode() if isinstance(name, bytes) else str(name)
        _mapped(self._agent.make_connection, self._peer)

    def start(self, writes: Sequence[EngineWrite], post: _NixlPost) -> None:
        local = [(w.src_address, w.nbytes, w.src_device or 0) for w in writes]
        remote = [(w.dst_address, w.nbytes, w.dst_device or 0) for w in writes]
        request = _mapped(
            self._agent.initialize_xfer,
            "WRITE",
            _mapped(self._agent.get_xfer_descs, local, _memory_type(writes[0].src_device)),
            _mapped(self._agent.get_xfer_descs, remote, _memory_type(writes[0].dst_device)),
            self._peer,
        )
        post.requests.append((self, request))
        self._check(_mapped(self._agent.transfer, request))

    def is_done(self, request: Any) -> bool:
        """Whether ``request`` is complete; it is released then."""
        if self._check(_mapped(self._agent.check_xfer_state, request)) != "DONE":
            return False
        _mapped(self._agent.release_xfer_handle, request)
        return True

    def abort(self, request: Any) -> None:
        try:
            self._agent.release_xfer_handle(request)
        except Exception as error:
            # It ends with the agent, which is destroyed next.
            logging.getLogger(__name__).debug("cannot abort a transfer: %s", error)

    def close(self) -> None:
        for label in list(self._registered):
            try:
                self.deregister(label)
            except EngineError as error:
                logging.getLogger(__name__).debug("cannot deregister %s: %s", label, error)
        # The wrapper holds the only reference: this runs the agent's destructor.
        self._agent = None

    @staticmethod
    def _check(state: str) -> str:
        if state not in ("DONE", "PROC"):
            raise EngineError(f"transfer state {state}")
        return state


def _mapped(call: Any, *args: Any) -> Any:
    """Call the library; its exceptions (plain ``Exception`` types of its own) become ours."""
    try:
        result = call(*args)
    except Exception as error:
        name = getattr(call, "__name__", "call")
        raise EngineError(f"NIXL {name}: {type(error).__name__}: {error}") from error
    return result


def _memory_type(device: int | None) -> str:
    return "DRAM" if device is None else "VRAM"


_bound = threading.local()


def _use_device(device: int | None) -> None:
    """Make the primary context of ``device`` current on this thread, once: UCX needs one to copy
    from or to a GPU.

    Raises:
        EngineError: the CUDA driver refuses.
    """
    if device is None or getattr(_bound, "device", None) == device:
        return
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError(f"device memory without a CUDA driver: {error}") from error
    context = ctypes.c_void_p()
    status = (
        cuda.cuInit(0)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda.cuCtxSetCurrent(context)
    )
    if status:
        raise EngineError(f"CUDA driver error {status} for device {device}")
    _bound.device = device
