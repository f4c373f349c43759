"""Certificates that are renewed while processes run, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import ssl
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deploy.certificates import make_certificates
from runtime.errors import ConfigError, PeerLostError
from runtime.metrics.core import MetricsServer
from runtime.net.credentials import Credentials, Listen, TlsFiles
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc import renewal
from runtime.rpc.grpc_calls import map_rpc_errors, open_channel
from runtime.rpc.renewal import CHECK_S, Renewed
from tests.runtime.rpc.fake_registry import RIGHT, FakeRegistry, serve

HOST = "127.0.0.1"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_files_that_change_are_read_again_and_those_that_do_not_are_not(tmp_path: Path) -> None:
    file, clock, made = tmp_path / "file", Clock(), list[str]()
    file.write_text("one")

    def make() -> str:
        if file.read_text() == "half":
            raise ConfigError("tls.cert", str(file), "is half written", "the rest")
        made.append(file.read_text())
        return made[-1]

    renewed = Renewed([str(file)], make, clock)
    for content, seen in (("one", "one"), ("half", "one"), ("whole", "whole"), (None, "whole")):
        if content is None:
            file.unlink()
        elif content != "one":
            file.write_text(content)
        if content == "whole":
            assert renewed.current() == "one", "it was looked at a moment ago"
        clock.now += CHECK_S
        if content is None:
            file.write_text("half")
        for _ in range(3):
            assert renewed.current() == seen
    assert made == ["one", "whole"]


def test_a_link_that_is_turned_is_a_change(tmp_path: Path) -> None:
    """So secrets are updated that are mounted into a container."""
    clock = Clock()
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1, 1))
    link, new = tmp_path / "link", tmp_path / "new"
    link.symlink_to("a")
    renewed = Renewed([str(link)], link.read_text, clock)
    new.symlink_to("b")
    new.rename(link)
    clock.now += CHECK_S
    assert renewed.current() == "b"


def test_what_cannot_be_used_at_the_start_is_an_error(tmp_path: Path) -> None:
    def make() -> None:
        raise ConfigError("tls.cert", "x", "is no PEM", "a PEM")

    with pytest.raises(ConfigError, match="no PEM"):
        Renewed([str(tmp_path / "x")], make)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TlsFiles:
    monkeypatch.setattr(renewal, "CHECK_S", 0.0)
    return make_certificates(tmp_path / "tls", (HOST,))


def renew(files: TlsFiles, tmp_path: Path) -> TlsFiles:
    """Put others in their place, of another authority; a copy of the former ones."""
    before = tmp_path / "before"
    before.mkdir()
    former = {name: shutil.copy(getattr(files, name), before) for name in ("cert", "key", "ca")}
    made = make_certificates(tmp_path / "made", (HOST,))
    for name in former:
        os.replace(getattr(made, name), getattr(files, name))
    return dataclasses.replace(files, **former)


async def test_grpc_shows_new_connections_the_new_certificate(
    files: TlsFiles, tmp_path: Path
) -> None:
    credentials = dataclasses.replace(RIGHT, tls=files)
    server, port = await serve(FakeRegistry(), credentials=credentials)
    request = registry_pb2.RenewRequest(lease_id="x")
    async with open_channel(f"{HOST}:{port}", credentials) as standing:
        await registry_pb2_grpc.RegistryStub(standing).Renew(request, timeout=60)
        former = dataclasses.replace(RIGHT, tls=renew(files, tmp_path))
        async with open_channel(f"{HOST}:{port}", credentials) as new:
            await registry_pb2_grpc.RegistryStub(new).Renew(request, timeout=60)
        await registry_pb2_grpc.RegistryStub(standing).Renew(request, timeout=60)
        async with open_channel(f"{HOST}:{port}", former) as old:
            with pytest.raises(PeerLostError), map_rpc_errors("registry"):
                await registry_pb2_grpc.RegistryStub(old).Renew(request, timeout=60)
    await server.stop(None)


async def scrape(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = [
        int(line.split(b":")[1])
        for line in head.lower().splitlines()
        if line.startswith(b"content-length")
    ]
    await reader.readexactly(length)
    return head.split(b"\r\n")[0]


@pytest.mark.parametrize("mutual", [False, True])
async def test_http_shows_new_connections_the_new_certificate(
    files: TlsFiles, tmp_path: Path, mutual: bool
) -> None:
    files = dataclasses.replace(files, http_mutual=mutual)
    credentials = Credentials(secret="s", tls=files)
    server = MetricsServer(CollectorRegistry())
    port = await server.start(Listen(bind=HOST), credentials.http_ssl_context())
    standing = await asyncio.open_connection(HOST, port, ssl=credentials.client_ssl_context())
    assert await scrape(*standing) == b"HTTP/1.1 200 OK"
    former = Credentials(secret="s", tls=renew(files, tmp_path)).client_ssl_context()
    new = await asyncio.open_connection(HOST, port, ssl=credentials.client_ssl_context())
    shown = [one[1].get_extra_info("ssl_object").getpeercert(True) for one in (standing, new)]
    assert shown[0] != shown[1]
    for one in (new, standing):
        assert await scrape(*one) == b"HTTP/1.1 200 OK"
    with pytest.raises(ssl.SSLError):
        await asyncio.open_connection(HOST, port, ssl=former)
    for _, writer in (standing, new):
        writer.close()
        await writer.wait_closed()
    await server.stop()
