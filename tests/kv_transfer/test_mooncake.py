"""What only Mooncake has: how it is loaded, its protocols, its status codes."""

from __future__ import annotations

import sys

import pytest

from kv_transfer.transports import TransportOptions, create_transport
from kv_transfer.transports.mooncake import MooncakeFactory
from kv_transfer.transports.paired.engine import EngineError, EngineWrite
from kv_transfer.transports.paired.outgoing import wait_for_post
from runtime.errors import ConfigError
from tests.kv_transfer.helpers import HOST, LAYOUT, Pool
from tests.kv_transfer.libraries import skip_unless_loaded


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match=r"kv_transfer.transport.*pip install.*\[mooncake\]"):
        create_transport("mooncake", local_name="x", host=HOST)


@pytest.mark.parametrize(
    ("missing", "fix"),
    [("libibverbs.so.1", "apt-get install libibverbs1"), ("libcudart.so.12", "non-cuda")],
)
def test_a_missing_system_library_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, missing: str, fix: str
) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"{missing}: cannot open shared object file: No such file")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(ConfigError, match=fix) as caught:
        MooncakeFactory(host=HOST)
    assert missing in str(caught.value)


def test_an_unknown_protocol_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="tcp, rdma, nvlink"):
        create_transport(
            "mooncake",
            local_name="x",
            host=HOST,
            options=TransportOptions(mooncake_protocol="pigeon"),
        )


def test_what_each_protocol_needs_for_a_fence() -> None:
    skip_unless_loaded("mooncake")
    for protocol, bypasses in (("tcp", False), ("rdma", False), ("nvlink", True)):
        assert MooncakeFactory(host=HOST, protocol=protocol).bypasses_receiver is bypasses


def test_a_write_to_memory_that_is_not_registered_is_an_error() -> None:
    skip_unless_loaded("mooncake")
    source, target = Pool(2), Pool(2)
    source.fill_random()
    factory = MooncakeFactory(host=HOST)
    sender, receiver = factory.create("sender"), factory.create("receiver")
    try:
        sender.register(source.region())
        receiver.register(target.region())
        sender.attach(receiver.address())
        write = EngineWrite(source.address, target.address, LAYOUT.block_bytes, None, None)
        wait_for_post(sender, sender.start([write]), 10.0)
        assert target.block(0) == source.block(0)
        receiver.deregister(target.region())
        target.memory[:] = bytes(len(target.memory))
        with pytest.raises(EngineError, match="status"):
            wait_for_post(sender, sender.start([write]), 20.0)
        assert target.is_zero()
    finally:
        sender.close()
        receiver.close()


def test_nobody_at_the_address() -> None:
    skip_unless_loaded("mooncake")
    engine = MooncakeFactory(host=HOST).create("alone")
    try:
        with pytest.raises(EngineError, match="probe"):
            engine.attach(b"127.0.0.1:1")
    finally:
        engine.close()
