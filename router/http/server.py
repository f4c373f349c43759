"""The inside of one HTTP process: its view of the pool, its ways to the workers, its app."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Sequence

from aiohttp import web

from router.backend import Backend, Backends
from router.http.access.gate import Gate
from router.http.app import create_app
from router.http.console.console import Console
from router.http.paths import take_trailing_slashes
from router.http.serving import Serving
from router.http.wire.connections import ConnectionLimits, Connections
from router.keys.ledger import KeyLedger, Ledger
from router.keys.source import KeySource
from router.metrics.core import RouterMetrics
from router.metrics.model import ModelMetrics
from router.metrics.recent import LoadLines, RecentWindow, Totals
from router.model import ServedModel
from router.pool.journal import PoolJournal
from router.pool.members import Departure, Member
from router.requests.admission import BodyBudget
from router.text.lanes import Lanes
from runtime.config import RouterSection, TracingSection
from runtime.errors import ConfigError
from runtime.net.credentials import Credentials
from runtime.stragglers.rank_picture import RankPicture
from runtime.tiers import Tiers
from runtime.trace.otlp import open_spans

TICK_S = 0.5
NO_TRACING = TracingSection()
SHUTDOWN_S = 2.0
"""Handlers get so long to end once the process shuts down."""


class HttpServer:
    """Serves HTTP for the pool that ``update`` tells it of. Create it on the event loop."""

    def __init__(
        self,
        section: RouterSection,
        models: Sequence[ServedModel],
        credentials: Credentials,
        *,
        metrics: RouterMetrics | None = None,
        keys: KeySource | None = None,
        ledger: Ledger | None = None,
        tiers: Tiers | None = None,
        tracing: TracingSection = NO_TRACING,
    ) -> None:
        """``section`` has this process's share of what is the whole router's.

        Without ``keys`` nobody is asked for one; ``ledger`` is where other processes count, too.
        """
        self._tls = credentials.http_ssl_context()
        loop = asyncio.get_running_loop()
        self.metrics = metrics or RouterMetrics()
        self._spans = open_spans(tracing, self.metrics.registry, role="router")
        tiers = tiers or Tiers()
        self.metrics.tiers.expect(tiers.names)
        self.metrics.introduce([model.name for model in models])
        self.backends = _backends_of(models, section, self.metrics, credentials, tiers)
        self._lanes = Lanes()
        self._connections = Connections(_limits_of(section), loop.time)
        self._recent = RecentWindow(lambda: Totals.of(self.metrics.sums().collect()), loop.time)
        self._load_lines = LoadLines(lambda: Totals.of(self.metrics.registry.collect()), loop.time)
        ledger = ledger or KeyLedger(loop.time)
        self._gate = _gate_of(section, keys, ledger, self.metrics, credentials, tiers=tiers)
        self._serving = serving = Serving(
            section=section,
            backends=self.backends,
            lanes=self._lanes,
            metrics=self.metrics,
            recent=self._recent.recent,
            gate=self._gate,
            credentials=credentials,
            tiers=tiers,
            spans=self._spans,
            sample_ratio=tracing.sample_ratio if self._spans else 0.0,
        )
        self._journal = PoolJournal(time.time)
        for backend in self.backends:
            backend.pool.on_failure(self._journal.note_failure)
        self._pool_version = self.backends.version
        self._console = Console(serving, self._connections, self._journal)
        self._runner = web.AppRunner(
            create_app(serving, self._connections, self._console.routes()),
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_S,
        )
        self._server: asyncio.Server | None = None
        self.update([])

    def update(self, members: Sequence[Member], departures: Sequence[Departure] = ()) -> None:
        """The pool changed; ``departures`` are the last that its registry knows of."""
        self.backends.update(members)
        if self.backends.version != self._pool_version:
            self._pool_version = self.backends.version
            self._journal.observe(members, departures)
        self.metrics.set_workers(members)

    def update_ranks(self, pictures: Sequence[RankPicture]) -> None:
        """What was made of the waits of ranks for one another."""
        self._serving.ranks = pictures
        self.metrics.ranks.set_pictures(pictures)

    def update_refused(self, refused: Sequence[str]) -> None:
        """Workers that the registry refuses, each with why."""
        self._serving.refused = tuple(refused)

    async def start(self, listener: socket.socket) -> None:
        """Serve on ``listener``, which is bound; this process owns it from now on."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        take_trailing_slashes(server)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connections.protocol_of(server), sock=listener, backlog=1024, ssl=self._tls
        )

    async def tick_forever(self) -> None:
        """Drop what workers that left no longer need and clients that are late; measure the loop.

        Until cancelled.
        """
        loop = asyncio.get_running_loop()
        while True:
            wanted = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            lag_s = max(0.0, loop.time() - wanted)
            self.metrics.loop_lag.set(lag_s)
            self.metrics.process.measure()
            self.metrics.settle()
            self.metrics.tiers.set_load(
                self.backends.num_waiting_by_tier(), self.backends.num_in_flight_by_tier()
            )
            self.metrics.connections.set(len(self._connections))
            self.metrics.texts_pending.set(self._lanes.num_pending)
            self._gate.tick()
            self._recent.tick()
            self._load_lines.tick(self.backends.num_in_flight, self.backends.num_waiting)
            for backend in self.backends:
                backend.tick()
            self._connections.sweep()
            self._console.tick(lag_s)

    async def drain(self) -> None:
        """Admit nothing new and refuse who waits; return when nothing is in flight."""
        self.backends.drain()
        self._connections.drain()
        while self.backends.num_in_flight:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """End all requests, streams and channels."""
        if self._server is not None:
            self._server.close()
        self._console.close()
        await self._runner.cleanup()
        self._lanes.close()
        await self.backends.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        self.metrics.settle()


def _backends_of(
    models: Sequence[ServedModel],
    section: RouterSection,
    metrics: RouterMetrics,
    credentials: Credentials,
    tiers: Tiers,
) -> Backends:
    bodies = BodyBudget(section.max_queue_bytes)
    router_id, clock = f"router-{secrets.token_hex(6)}", asyncio.get_running_loop().time
    backends = [
        Backend(
            *(model, section, ModelMetrics(metrics, model.name)),
            credentials=credentials,
            router_id=router_id,
            clock=clock,
            bodies=bodies,
            tiers=tiers,
        )
        for model in models
    ]
    return Backends(backends)


def _gate_of(
    section: RouterSection,
    keys: KeySource | None,
    ledger: Ledger,
    metrics: RouterMetrics,
    credentials: Credentials,
    *,
    tiers: Tiers,
) -> Gate:
    are_open = section.metrics_access == "open"
    return Gate(keys, ledger, metrics, credentials, tiers=tiers, metrics_are_open=are_open)


def _limits_of(section: RouterSection) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=section.max_connections,
        header_timeout_s=section.header_timeout_s,
        stall_timeout_s=section.client_stall_timeout_s,
    )


def bind_http(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket bound to ``host:port`` (0: any free one), not listening yet.

    ``shared``: several processes of ours bind it, and the kernel spreads connections over them.

    Raises:
        ConfigError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        problem = f"cannot listen on {host}: {error.strerror}"
        raise ConfigError("router.port", port, problem, "a free port, or 0 for any") from error
    listener.setblocking(False)
    return listener


def port_of(listener: socket.socket) -> int:
    """The port that a bound socket has."""
    port: int = listener.getsockname()[1]
    return port
