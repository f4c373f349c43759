"""The router's processes: the control process with the registry, and HTTP processes on one port.

With ``router.http_processes = 1`` the control process serves HTTP itself. With more it starts that
many children, which bind the same port (SO_REUSEPORT), follow the registry over gRPC and die with
it; a child that ends is started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc.aio
from prometheus_client.multiprocess import mark_process_dead

from router.http.access.gate import holder_of
from router.http.server import HttpServer, bind_http, port_of
from router.keys.ledger import KeyLedger
from router.keys.service import KeysService, RemoteLedger
from router.keys.source import key_source
from router.metrics.core import RouterMetrics
from router.model import load_served_models
from router.pool.registry import Registry
from router.pool.registry_service import RegistryService, watch_forever
from runtime.config import ClusterConfig, RouterSection
from runtime.config.file import cluster_credentials, secret_variables
from runtime.logging import get_logger
from runtime.net.credentials import Credentials, Listen, join_address
from runtime.net.roles import Role
from runtime.pb import keys_pb2_grpc, registry_pb2_grpc
from runtime.process import dying_with_us
from runtime.rpc.grpc_calls import CONTROL_LIMITS, bind_port, create_server
from runtime.tiers import Tiers

logger = get_logger(__name__)

RESTART_S = 0.5
METRICS_DIR_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def share_of_process(section: RouterSection) -> RouterSection:
    """``section`` with what is the whole router's divided by its HTTP processes."""
    num_processes = section.http_processes
    return replace(
        section,
        max_concurrent_requests=_share(section.max_concurrent_requests, num_processes),
        max_queue_bytes=max(1024, _share(section.max_queue_bytes, num_processes)),
        max_connections=_share(section.max_connections, num_processes),
    )


def _share(total: int, num_processes: int) -> int:
    return -(-total // num_processes)


class RouterService:
    """The control process."""

    def __init__(self, config: ClusterConfig, config_path: Path) -> None:
        """``config_path`` is handed to HTTP children.

        Raises:
            ConfigError: the model or the keys cannot be served with; or strangers could ask, and
                ``router.allow_anonymous`` does not say so.
        """
        self._config = config
        self._config_path = config_path
        self._keys = key_source(config)
        self._models = load_served_models(config)
        for model in self._models:
            if model.template_remark:
                logger.info("model=%s %s", model.name, model.template_remark)
        self._credentials = cluster_credentials(config, Role.ROUTER)
        self._server: grpc.aio.Server | None = None
        self.http_port = 0
        """Where it serves, after ``startup``."""
        self.control_port = 0
        self._registry: RegistryService | None = None
        self._http: HttpServer | None = None
        self._children: HttpChildren | None = None

    async def startup(self) -> None:
        """Bind both ports; serve the registry and HTTP."""
        config, section = self._config, self._config.router
        cluster, host = config.cluster, config.http_host
        loop = asyncio.get_running_loop()
        listener = bind_http(host, section.port)
        listen = Listen(bind=cluster.host, advertise=cluster.advertise, port=section.control_port)
        self._server = server = create_server(self._credentials, CONTROL_LIMITS)
        control_port = bind_port(server, listen, self._credentials, "router.control_port")
        registry = Registry([model.name for model in self._models], section.lease_ttl_s, loop.time)
        self.http_port = port = port_of(listener)
        self.control_port = control_port
        control = listen.address(control_port)
        if section.http_processes == 1:
            self._http = HttpServer(
                section,
                self._models,
                self._credentials,
                keys=self._keys,
                tiers=Tiers(config.tiers),
                tracing=config.tracing,
            )
            self._registry = RegistryService(
                registry,
                self._http.update,
                on_ranks=self._http.update_ranks,
                on_refused=self._http.update_refused,
            )
            await self._http.start(listener)
        else:
            listener.close()  # it only found out that nobody else has the port
            self._registry = RegistryService(registry)
            shared = bind_http(host, port, shared=True)
            ledger = KeyLedger(loop.time)
            keys_pb2_grpc.add_KeysServicer_to_server(KeysService(ledger), server)
            self._children = HttpChildren(
                *(self._config_path, control, self._credentials, shared, section.http_processes),
                on_ended=lambda pid: ledger.forget(holder_of(pid)),
            )
            self._children.start()
        registry_pb2_grpc.add_RegistryServicer_to_server(self._registry, server)
        await server.start()
        for model in self._models:
            for remark in model.remarks:
                logger.info("checkpoint model=%s note=%s", model.name, remark)
        scheme = "http" if self._credentials.tls is None else "https"
        logger.info(
            "serving models=%s http=%s://%s/v1 control=%s",
            ",".join(model.name for model in self._models),
            scheme,
            join_address(host, port),
            control,
        )

    async def main_loop(self) -> None:
        """Let leases run out; supervise children."""
        assert self._registry is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._registry.expire_forever())
            if self._http is not None:
                group.create_task(self._http.tick_forever())
            if self._children is not None:
                group.create_task(self._children.supervise_forever())

    async def drain(self) -> None:
        """Finish the requests that were admitted."""
        if self._http is not None:
            await self._http.drain()
        if self._children is not None:
            await self._children.drain()

    async def shutdown(self) -> None:
        """Release both ports and everything behind them."""
        if self._registry is not None:
            self._registry.close()
        if self._http is not None:
            await self._http.close()
        if self._children is not None:
            await self._children.close()
        if self._server is not None:
            await self._server.stop(0.5)


class HttpWorkerService:
    """One of several HTTP processes."""

    def __init__(self, config: ClusterConfig, control: str, port: int) -> None:
        """``control`` is the control process's gRPC address, ``port`` the shared HTTP port."""
        self._config = config
        self._control = control
        self._port = port
        self._keys = key_source(config)
        self._models = load_served_models(config)
        self._credentials = cluster_credentials(config, Role.ROUTER)
        self._http: HttpServer | None = None
        self._ledger: RemoteLedger | None = None

    async def startup(self) -> None:
        """Join the shared port."""
        section = self._config.router
        self._ledger = RemoteLedger(self._control, self._credentials)
        self._http = HttpServer(
            share_of_process(section),
            self._models,
            self._credentials,
            metrics=RouterMetrics(os.environ.get(METRICS_DIR_VARIABLE)),
            keys=self._keys,
            ledger=self._ledger,
            tiers=Tiers(self._config.tiers),
            tracing=self._config.tracing,
        )
        listener = bind_http(self._config.http_host, self._port, shared=True)
        await self._http.start(listener)
        logger.info("serving port=%d pid=%d", self._port, os.getpid())

    async def main_loop(self) -> None:
        """Follow the registry."""
        assert self._http is not None
        async with asyncio.TaskGroup() as group:
            watcher = f"http-{os.getpid()}"
            http = self._http
            group.create_task(
                watch_forever(
                    *(self._control, self._credentials, watcher),
                    http.update,
                    on_ranks=http.update_ranks,
                    on_refused=http.update_refused,
                )
            )
            group.create_task(self._http.tick_forever())

    async def drain(self) -> None:
        """Finish the requests that were admitted."""
        if self._http is not None:
            await self._http.drain()

    async def shutdown(self) -> None:
        """Release everything."""
        if self._http is not None:
            await self._http.close()
        if self._ledger is not None:
            await self._ledger.close()


class HttpChildren:
    """The HTTP processes of a control process, and the folder where their metrics add up."""

    def __init__(
        self,
        config_path: Path,
        control: str,
        credentials: Credentials,
        shared: socket.socket,
        number: int,
        *,
        on_ended: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """``shared`` holds the port for the children, who bind it too; it never listens.

        ``on_ended`` is called with the pid of a child that has ended.
        """
        self._on_ended = on_ended
        self._shared = shared
        self._number = number
        self._metrics_dir = tempfile.mkdtemp(prefix="tandem-metrics-")
        self._command = [sys.executable, "-m", "router", "--config", str(config_path)]
        self._command += ["--control", control, "--port", str(port_of(shared))]
        self._env = {
            **os.environ,
            **secret_variables(credentials),
            METRICS_DIR_VARIABLE: self._metrics_dir,
        }
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        """Start all; they serve as soon as they have loaded."""
        self._tasks = [
            asyncio.create_task(self._keep(index), name=f"http-child-{index}")
            for index in range(self._number)
        ]

    async def supervise_forever(self) -> None:
        """Keep all running; until cancelled."""
        await asyncio.gather(*(asyncio.shield(task) for task in self._tasks))

    async def drain(self) -> None:
        """Ask all to finish; return when they have ended."""
        self._stopping = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """End those that are left."""
        self._stopping = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._shared.close()
        shutil.rmtree(self._metrics_dir, ignore_errors=True)

    async def _keep(self, index: int) -> None:
        while not self._stopping:
            process = await asyncio.create_subprocess_exec(
                *dying_with_us(self._command),
                env=self._env,
            )
            self._processes[index] = process
            status = await process.wait()
            del self._processes[index]
            self._on_ended(process.pid)
            mark_process_dead(process.pid, self._metrics_dir)  # type: ignore[no-untyped-call]
            if not self._stopping:
                logger.error("an HTTP process ended pid=%d status=%d", process.pid, status)
                await asyncio.sleep(RESTART_S)
