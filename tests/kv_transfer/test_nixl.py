"""What only NIXL has: how it is loaded, its environment, rails, device memory without a driver."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import pytest

from kv_transfer.transport import MemoryRegion
from kv_transfer.transports import create_transport, resolve_transport
from kv_transfer.transports.nixl import NixlFactory, load_nixl
from kv_transfer.transports.paired.engine import EngineError, EngineWrite
from kv_transfer.transports.paired.outgoing import wait_for_post
from runtime.errors import ConfigError
from tests.kv_transfer.helpers import HOST, LAYOUT, Pool
from tests.kv_transfer.libraries import skip_unless_loaded

MODULES = ("nixl", "nixl._api", "nixl_cu13._api", "nixl_cu12._api")


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"kv_transfer.transport.*pip install.*\[nixl\]"):
        create_transport("nixl", local_name="x", host=HOST)
    name, reason = resolve_transport("auto")
    assert name == "loopback"
    assert "pip install" in reason


def test_auto_is_nixl_where_it_loads() -> None:
    skip_unless_loaded("nixl")
    assert resolve_transport("auto")[0] == "nixl"
    assert resolve_transport("mooncake") == ("mooncake", "configured")


def test_a_set_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_loaded("nixl")
    monkeypatch.setenv("UCX_MEM_MMAP_HOOK_MODE", "bistro")
    monkeypatch.delenv("UCX_HANDLE_ERRORS", raising=False)
    load_nixl()
    assert os.environ["UCX_MEM_MMAP_HOOK_MODE"] == "bistro"
    assert os.environ["UCX_HANDLE_ERRORS"] == "none"


def test_a_receiver_that_waits_costs_no_core() -> None:
    skip_unless_loaded("nixl")
    receiver = NixlFactory().create("receiver")
    try:
        receiver.address()  # makes the agent, with its progress thread
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.3
    finally:
        receiver.close()


def test_rails_share_the_writes_of_a_post() -> None:
    skip_unless_loaded("nixl")
    source, target = Pool(16), Pool(16)
    source.fill_random()
    factory = NixlFactory(rails=3)
    sender, receiver = factory.create("sender"), factory.create("receiver")
    try:
        sender.register(source.region())
        receiver.register(target.region())
        sender.attach(receiver.address())
        size = LAYOUT.block_bytes
        writes = [
            EngineWrite(
                source.address + i * size, target.address + (15 - i) * size, size, None, None
            )
            for i in range(16)
        ]
        wait_for_post(sender, sender.start(writes), 10.0)
        assert all(target.block(15 - i) == source.block(i) for i in range(16))
    finally:
        sender.close()
        receiver.close()


def test_errors_of_the_library_are_ours() -> None:
    skip_unless_loaded("nixl")
    engine = NixlFactory().create("alone")
    try:
        with pytest.raises(EngineError, match="NIXL"):
            engine.attach(b"not metadata")
    finally:
        engine.close()
    with pytest.raises(ConfigError, match="rails"):
        NixlFactory(rails=0)


def test_device_memory_without_a_driver_is_an_error_not_a_crash() -> None:
    skip_unless_loaded("nixl")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        engine = NixlFactory().create("no-gpu")
        with pytest.raises(EngineError, match="CUDA driver"):
            engine.register(MemoryRegion("kv", 4096, 4096, device=0))
    else:
        pytest.skip("this machine has a CUDA driver")


def test_a_process_that_leaves_its_transport_open_ends_cleanly() -> None:
    """A live agent at the interpreter's exit must not crash the process."""
    skip_unless_loaded("nixl")
    code = (
        "from tests.kv_transfer.helpers import *\n"
        "a, b = DecodeSide(transport='nixl'), PrefillSide(transport='nixl')\n"
        "t = a.reserve('r', [1, 2]); b.send(t, a.peer(), [3, 4]); a.arrival(); b.report()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
