"""Addresses, secrets and certificates, over real sockets where two ends are concerned."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.certificates import make_certificates
from runtime.errors import ConfigError
from runtime.net.credentials import Credentials, Listen, TlsFiles, is_loopback, join_address
from runtime.net.roles import ALL_ROLES

HOST = "127.0.0.1"


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return make_certificates(tmp_path / "tls", (HOST, "localhost"))


@pytest.mark.parametrize("bind", ["0.0.0.0", "::"])
def test_all_interfaces_are_no_address(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.advertise") as caught:
        Listen(bind=bind)
    assert caught.value.path == "cluster.host"
    assert Listen(bind=bind, advertise="10.0.0.5").address(80) == "10.0.0.5:80"
    with pytest.raises(ConfigError, match=r"cluster\.advertise"):
        Listen(bind=HOST, advertise=bind)


def test_an_address_of_ipv6_has_brackets() -> None:
    assert join_address("::1", 80) == "[::1]:80"
    assert Listen(bind="::1").address(80) == "[::1]:80"


def test_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.5", "0.0.0.0", "::", "localhost.example", "node")))


def test_two_secrets_are_accepted_at_once() -> None:
    both = Credentials(secret="new", previous_secret="old")
    assert both.roles_of(b"new") == both.roles_of(b"old") == ALL_ROLES
    assert not both.roles_of(b"")
    assert not both.roles_of(b"other")
    assert not Credentials.of_secret("new").roles_of(b"")


def test_a_secret_is_not_printed() -> None:
    shown = repr(Credentials(secret="sesame", previous_secret="before"))
    assert "sesame" not in shown
    assert "before" not in shown


def test_without_tls_there_is_no_context() -> None:
    plain = Credentials.of_secret("s")
    contexts = (plain.server_ssl_context(), plain.client_ssl_context(), plain.http_ssl_context())
    assert contexts == (None, None, None)


@contextlib.contextmanager
def echo(context: ssl.SSLContext | None) -> Iterator[int]:
    """The port of a server that says back what it hears, to whoever gets through to it."""
    assert context is not None
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), context.wrap_socket(connection, True) as peer:
                peer.sendall(peer.recv(100))

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def call(port: int, context: ssl.SSLContext | None, name: str = HOST) -> bytes:
    assert context is not None
    with (
        socket.create_connection((HOST, port)) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        connection.sendall(b"hello")
        return connection.recv(100)


def test_our_sockets_ask_both_ends_for_a_certificate(files: TlsFiles) -> None:
    credentials = Credentials(secret="s", tls=files)
    with echo(credentials.server_ssl_context()) as port:
        assert call(port, credentials.client_ssl_context()) == b"hello"
        with pytest.raises(OSError, match=r"certificate required|reset|EOF"):
            call(port, ssl.create_default_context(cafile=files.ca))
        with pytest.raises(ssl.SSLError, match="mismatch"):
            call(port, credentials.client_ssl_context(), "elsewhere.example")


def test_another_authority_is_not_believed(files: TlsFiles, tmp_path: Path) -> None:
    others = make_certificates(tmp_path / "others", (HOST,))
    credentials = Credentials(secret="s", tls=files)
    stranger = Credentials(secret="s", tls=others)
    with echo(credentials.server_ssl_context()) as port:
        with pytest.raises(ssl.SSLError, match=r"unable to get|self-signed|verify failed"):
            call(port, stranger.client_ssl_context())
        mixed = dataclasses.replace(others, ca=files.ca)
        with pytest.raises(OSError, match=r"unknown ca|reset|EOF|decrypt"):
            call(port, Credentials(secret="s", tls=mixed).client_ssl_context())


def test_http_asks_its_clients_only_where_it_is_told_to(files: TlsFiles) -> None:
    anybody = ssl.create_default_context(cafile=files.ca)
    with echo(Credentials(secret="s", tls=files).http_ssl_context()) as port:
        assert call(port, anybody) == b"hello"
    asking = Credentials(secret="s", tls=dataclasses.replace(files, http_mutual=True))
    with echo(asking.http_ssl_context()) as port:
        assert call(port, asking.client_ssl_context()) == b"hello"
        with pytest.raises(OSError, match=r"certificate required|reset|EOF"):
            call(port, anybody)


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
@pytest.mark.parametrize("content", [None, "no PEM"])
def test_a_file_that_cannot_be_used_is_named(
    files: TlsFiles, tmp_path: Path, name: str, content: str | None
) -> None:
    path = tmp_path / "wrong.pem"
    if content is not None:
        path.write_text(content)
    wrong = Credentials(secret="s", tls=dataclasses.replace(files, **{name: str(path)}))
    with pytest.raises(ConfigError, match=r"wrong\.pem") as caught:
        wrong.server_ssl_context()
    assert caught.value.path == ("tls.ca" if name == "ca" else "tls.cert")


def test_a_key_of_another_certificate_is_refused(files: TlsFiles, tmp_path: Path) -> None:
    others = make_certificates(tmp_path / "others", (HOST,))
    with pytest.raises(ConfigError, match="MISMATCH"):
        dataclasses.replace(files, key=others.key).read()


def test_a_certificate_must_be_for_the_address_that_peers_are_told(
    files: TlsFiles, tmp_path: Path
) -> None:
    Credentials(secret="s").check_certificate("10.0.0.5")
    Credentials(secret="s", tls=files).check_certificate(HOST)
    others = make_certificates(tmp_path / "others", (HOST,))
    for wrong, host, message in (
        (files, "10.0.0.5", "10.0.0.5.*not valid for"),
        (files, "elsewhere.example", "elsewhere.example.*mismatch"),
        (dataclasses.replace(files, ca=others.ca), HOST, "signature|issuer|self-signed|unable"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            Credentials(secret="s", tls=wrong).check_certificate(host)
        assert caught.value.path == "tls.cert"
