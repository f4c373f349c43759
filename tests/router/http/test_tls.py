"""HTTP with a certificate, and the control port beside it."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest

from deploy.certificates import make_certificates
from router.service import RouterService
from runtime.config import ClusterConfig, ClusterSection, ModelSection, RouterSection, TlsSection
from runtime.config.file import cluster_credentials
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc.grpc_calls import map_rpc_errors, open_channel
from tests.router.conftest import MODEL
from tests.router.fakes import SECRET


@pytest.mark.parametrize("http_mutual", [False, True])
async def test_http_and_the_control_port_speak_tls(
    tmp_path: Path, model_dir: Path, http_mutual: bool
) -> None:
    files = make_certificates(tmp_path / "tls", ("127.0.0.1",))
    config = ClusterConfig(
        cluster=ClusterSection(secret=SECRET),
        model=ModelSection(path=str(model_dir), name=MODEL),
        router=RouterSection(port=0, control_port=0),
        tls=TlsSection(
            mode="files", cert=files.cert, key=files.key, ca=files.ca, http_mutual=http_mutual
        ),
    )
    credentials = cluster_credentials(config)
    service = RouterService(config, Path("unused.toml"))
    await service.startup()
    anybody = ssl.create_default_context(cafile=files.ca)
    ours = credentials.client_ssl_context()
    assert ours is not None
    url = f"https://127.0.0.1:{service.http_port}/health"
    async with aiohttp.ClientSession() as http:
        async with http.get(url, ssl=ours) as response:
            assert response.status == 200
        if http_mutual:
            with pytest.raises(aiohttp.ClientError):
                await http.get(url, ssl=anybody)
        else:
            async with http.get(url, ssl=anybody) as response:
                assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await http.get(url.replace("https:", "http:"))
    async with open_channel(f"127.0.0.1:{service.control_port}", credentials) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        with map_rpc_errors("registry"):
            assert not (await stub.Renew(registry_pb2.RenewRequest(lease_id="x"))).known
    await service.shutdown()


async def test_http_listens_where_the_router_is_told_to_and_the_registry_does_not(
    model_dir: Path,
) -> None:
    config = ClusterConfig(
        cluster=ClusterSection(secret=SECRET),
        model=ModelSection(path=str(model_dir), name=MODEL),
        router=RouterSection(host="127.0.0.2", port=0, control_port=0),
    )
    service = RouterService(config, Path("unused.toml"))
    await service.startup()
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.2:{service.http_port}/health") as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"http://127.0.0.1:{service.http_port}/health")
    credentials = cluster_credentials(config)
    async with open_channel(f"127.0.0.1:{service.control_port}", credentials) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        with map_rpc_errors("registry"):
            assert not (await stub.Renew(registry_pb2.RenewRequest(lease_id="x"))).known
    await service.shutdown()
