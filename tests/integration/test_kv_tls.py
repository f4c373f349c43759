"""With ``[tls]`` the sockets that carry KV, or control it, ask both workers for a certificate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decode.assembly import TransferSide, build_transfer_side
from deploy.certificates import Authority, make_certificates
from engine.attention.kv_spec import KVSpec
from engine.memory.kv_pool import KVPool
from engine.parallel.dims import ParallelDims
from kv_transfer.transport import peer_name
from prefill.assembly import SendSide, build_send_side
from runtime.config import ClusterConfig, KVTransferSection, ModelSection
from runtime.errors import PeerLostError, StaleTicketError
from runtime.net.credentials import Credentials, Listen, TlsFiles
from runtime.net.roles import Role
from runtime.pb import decode_pb2
from runtime.rpc.wire import identity
from tests.kv_transfer.libraries import LIBRARIES, skip_unless_loaded
from worker.arguments import WorkerOptions

HOST = "127.0.0.1"
EPOCH = 5
WRITER, READER = identity("prefill-0", EPOCH, 0), identity("decode-0", EPOCH, 0)


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return make_certificates(tmp_path / "tls", (HOST,))


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def options_of(role: str, transport: str, tls: TlsFiles | None) -> WorkerOptions:
    return WorkerOptions(
        role=role,
        config=ClusterConfig(
            model=ModelSection(path="bundled"), kv_transfer=KVTransferSection(transport=transport)
        ),
        instance=f"{role}-0",
        rank=0,
        rendezvous="",
        router="127.0.0.1:1",
        listen=Listen(bind=HOST),
        credentials=Credentials(secret="s", tls=tls),
    )


def booted(closing: ExitStack) -> Any:
    """A rank whose KV moves, and that has no model. Its memory outlives what is registered."""
    kv_pool = KVPool(4, 2, 16, KVSpec.shared(8))
    closing.callback(lambda: kv_pool.nbytes)
    return SimpleNamespace(
        groups=SimpleNamespace(dims=ParallelDims()), epoch=EPOCH, kv_pool=kv_pool
    )


def decode_side(closing: ExitStack, transport: str, tls: TlsFiles | None) -> TransferSide:
    options = options_of("decode", transport, tls)
    side = build_transfer_side(options, booted(closing), lambda _: None)
    closing.callback(side.close)
    return side


def prefill_side(closing: ExitStack, transport: str, tls: TlsFiles | None) -> SendSide:
    options = options_of("prefill", transport, tls)
    side = build_send_side(options, booted(closing), lambda _: None)
    closing.callback(side.close)
    return side


def connect(writer: SendSide, reader: TransferSide, transport: str) -> None:
    endpoint: decode_pb2.PeerEndpoint = reader.endpoint_for(WRITER, READER, transport, 0)
    peer = peer_name(READER.instance, READER.epoch, READER.rank)
    writer.transport.connect(peer, endpoint.endpoint)


@pytest.mark.parametrize("transport", ["loopback", *LIBRARIES])
def test_only_a_worker_of_the_cluster_gets_as_far_as_the_hello(
    transport: str, closing: ExitStack, files: TlsFiles, tmp_path: Path
) -> None:
    if transport in LIBRARIES:
        skip_unless_loaded(transport)
    reader = decode_side(closing, transport, files)
    others = make_certificates(tmp_path / "others", (HOST,))
    strangers = {
        "plain": None,
        "of another authority": dataclasses.replace(others, ca=files.ca),
        "believing another authority": dataclasses.replace(files, ca=others.ca),
    }
    for tls in strangers.values():
        stranger = prefill_side(closing, transport, tls)
        with pytest.raises(PeerLostError):
            connect(stranger, reader, transport)
    connect(prefill_side(closing, transport, files), reader, transport)


@pytest.mark.parametrize("transport", ["loopback", *LIBRARIES])
@pytest.mark.parametrize("role", list(Role))
def test_only_a_worker_by_its_certificate_is_let_in(
    transport: str, role: Role, closing: ExitStack, tmp_path: Path
) -> None:
    """Although it has the token, as who was handed one by mistake."""
    if transport in LIBRARIES:
        skip_unless_loaded(transport)
    authority = Authority.make()
    own = make_certificates(tmp_path / "own", (HOST,), authority, roles=(Role.DECODE,))
    shown = make_certificates(tmp_path / "shown", (HOST,), authority, roles=(role,))
    reader, writer = decode_side(closing, transport, own), prefill_side(closing, transport, shown)
    if role in (Role.PREFILL, Role.DECODE):
        connect(writer, reader, transport)
        return
    told = f"Kv.connect is for prefill and decode, and the caller is {role}"
    with pytest.raises(StaleTicketError, match=told):
        connect(writer, reader, transport)
