"""TLS on our own sockets: whole transfers, and who is refused."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kv_transfer.transport import KV_REGION, RegionWrite, TransferState, Transport
from kv_transfer.transports import TlsContexts, TransportOptions, create_transport
from kv_transfer.transports.loopback.endpoint import LoopbackEndpoint
from kv_transfer.transports.tls import TlsSocket
from runtime.errors import PeerLostError
from tests.kv_transfer.helpers import HOST, LAYOUT, DecodeSide, Pool, PrefillSide
from tests.kv_transfer.libraries import LIBRARIES, skip_unless_loaded
from tests.waiting import wait_until

MakeTransport = Callable[..., Transport]
BIG = replace(LAYOUT, block_size=2048)


class Authority:
    """Signs certificates of nodes at ``HOST``; its contexts ask both ends for one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        builder = self._builder(self._name, self._key)
        constraint = x509.BasicConstraints(ca=True, path_length=0)
        certificate = builder.add_extension(constraint, critical=True).sign(
            self._key, hashes.SHA256()
        )
        (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self._make_node()

    def contexts(self) -> TlsContexts:
        return TlsContexts(
            server=self._context(ssl.PROTOCOL_TLS_SERVER),
            client=self._context(ssl.PROTOCOL_TLS_CLIENT),
        )

    def without_certificate(self) -> TlsContexts:
        client = ssl.create_default_context(cafile=str(self._folder / "ca.pem"))
        return TlsContexts(server=self._context(ssl.PROTOCOL_TLS_SERVER), client=client)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.load_cert_chain(self._folder / "node.pem")
        context.load_verify_locations(self._folder / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _make_node(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
        certificate = (
            self._builder(name, key)
            .add_extension(address, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        private = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (self._folder / "node.pem").write_bytes(private + certificate.public_bytes(pem))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture
def make() -> Iterator[MakeTransport]:
    made: list[Transport] = []

    def make_transport(name: str, tls: TlsContexts | None, kind: str = "loopback") -> Transport:
        options = TransportOptions(tls=tls)
        made.append(create_transport(kind, local_name=name, host=HOST, options=options))
        return made[-1]

    yield make_transport
    for transport in made:
        transport.close()


def test_data_arrives_whole(make: MakeTransport, authority: Authority) -> None:
    """Posts of 32 MiB in flight, so that acknowledgements come while data goes."""
    source, target = Pool(64, BIG), Pool(64, BIG)
    source.fill_random()
    writer, reader = make("writer", authority.contexts()), make("reader", authority.contexts())
    writer.register(source.region())
    reader.register(target.region())
    peer = writer.connect("reader", reader.endpoint("writer"))
    size = BIG.block_bytes
    posts = [
        [
            RegionWrite(KV_REGION, source.address + block * size, (63 - block) * size, size)
            for block in range(start, start + 8)
        ]
        for start in range(0, 64, 8)
    ]
    handles = [writer.post(peer, post, b"landed") for post in posts]
    for handle in handles:
        wait_until(lambda h=handle: writer.poll(h) is TransferState.DONE)  # type: ignore[misc]
        writer.release(handle)
    assert all(target.block(63 - block) == source.block(block) for block in range(64))
    wait_until(lambda: len(reader.notifications()) == 8)
    reader.fence("writer")
    wait_until(lambda: not writer.is_connected(peer))


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_whole_hand_over_behind_a_control_socket(kind: str, authority: Authority) -> None:
    skip_unless_loaded(kind)
    options = TransportOptions(tls=authority.contexts())
    decode = DecodeSide(transport=kind, options=options)
    prefill = PrefillSide(transport=kind, transport_options=options)
    try:
        prefill.send(decode.reserve("r", [1, 2]), decode.peer(), [3, 4])
        assert prefill.report().error is None
        assert decode.arrival().error is None
        assert decode.pool.block(1) == prefill.pool.block(3)
    finally:
        prefill.close()
        decode.close()


def test_a_plain_client_is_refused(make: MakeTransport, authority: Authority) -> None:
    reader, writer = make("reader", authority.contexts()), make("writer", None)
    with pytest.raises(PeerLostError):
        writer.connect("reader", reader.endpoint("writer"))
    endpoint = reader.endpoint("secure")
    make("secure", authority.contexts()).connect("reader", endpoint)


def test_a_plain_server_is_refused(make: MakeTransport, authority: Authority) -> None:
    reader, writer = make("reader", None), make("writer", authority.contexts())
    with pytest.raises(PeerLostError):
        writer.connect("reader", reader.endpoint("writer"))


def test_who_has_no_certificate_of_our_authority_is_refused(
    make: MakeTransport, authority: Authority, tmp_path: Path
) -> None:
    reader = make("reader", authority.contexts())
    foreign = Authority(tmp_path / "foreign")
    for name, tls in (("foreign", foreign.contexts()), ("none", authority.without_certificate())):
        with pytest.raises(PeerLostError):
            make(name, tls).connect("reader", reader.endpoint(name))


def test_silent_strangers_make_no_threads(make: MakeTransport, authority: Authority) -> None:
    reader = make("reader", authority.contexts())
    endpoint = LoopbackEndpoint.decode(reader.endpoint("writer"))
    writer = make("writer", authority.contexts())
    threads = set(threading.enumerate())
    strangers = [socket.create_connection((HOST, endpoint.port)) for _ in range(100)]
    try:
        peer = writer.connect("reader", endpoint.encode())
        writer.disconnect(peer)
        wait_until(lambda: set(threading.enumerate()) <= threads)
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.fixture
def ends(authority: Authority) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """Both ends of one connection."""
    tls, sockets = authority.contexts(), socket.socketpair()
    made: list[ssl.SSLSocket] = []
    server = threading.Thread(
        target=lambda: made.append(tls.server.wrap_socket(sockets[0], server_side=True))
    )
    server.start()
    client = TlsSocket(tls.client.wrap_socket(sockets[1], server_hostname=HOST))
    server.join()
    yield TlsSocket(made[0]), client
    client.close()
    made[0].close()


def test_a_shut_down_socket_gives_no_bytes_that_were_not_decrypted(
    ends: tuple[TlsSocket, TlsSocket],
) -> None:
    reader, writer = ends
    writer.sendall(b"x" * 100)
    reader.shutdown(socket.SHUT_RDWR)
    found = bytearray(200)
    while num := reader.recv_into(memoryview(found)):
        assert found[:num] == b"x" * num


def test_a_socket_keeps_its_timeout(ends: tuple[TlsSocket, TlsSocket]) -> None:
    for end in ends:
        end.settimeout(0.05)
    with pytest.raises(TimeoutError):
        ends[0].recv_into(memoryview(bytearray(1)))
    with pytest.raises(TimeoutError):
        ends[1].sendall(bytes(64 << 20))  # nobody reads
