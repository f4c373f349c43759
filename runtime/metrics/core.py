"""Prometheus metrics of one process, on a registry that is passed around, never global.

Answers are always ``text/plain; version=0.0.4``: newer formats rename metrics with colons for some
scrapers, which breaks dashboards that ask for the original names.
"""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from runtime.errors import ConfigError
from runtime.metrics import vllm_names
from runtime.metrics.vllm_names import VllmNames
from runtime.net.credentials import Listen

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)

SHORT_BUCKETS_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 1.0),
)
"""Of work that should take microseconds."""

BYTES_BUCKETS = tuple(float(4**power) for power in range(5, 17))
"""1 KiB to 4 GiB."""


def merged(*buckets: Iterable[float]) -> tuple[float, ...]:
    """The bounds of all, in order: whoever asks for either finds its own."""
    return tuple(sorted({float(bound) for several in buckets for bound in several}))


# What vLLM has a name for has its buckets, too; those of ours resolve what is shorter.
REQUEST_BUCKETS_S = merged(LATENCY_BUCKETS_S, vllm_names.REQUEST_BUCKETS_S)
"""Of a request, or a part of it."""

TTFT_BUCKETS_S = merged(LATENCY_BUCKETS_S, vllm_names.TTFT_BUCKETS_S)

ITL_BUCKETS_S = merged(
    (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 8.0),
    vllm_names.ITL_BUCKETS_S,
)

LENGTH_BUCKETS = merged(
    (4, 16, 64, 256, 1024, 4096, 16384, 65536, 163840), vllm_names.LENGTH_BUCKETS
)
"""Tokens of a prompt or of an output."""

STEP_BUCKETS = merged((1 << power for power in range(18)), vllm_names.STEP_BUCKETS)
"""Tokens of a step."""


@dataclass(frozen=True, slots=True)
class _Collected(Collector):
    families: list[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def render_metrics(registry: Collector, vllm: VllmNames | None = None) -> bytes:
    """All metrics of ``registry`` in the text format 0.0.4, and what ``vllm`` makes of them."""
    families = list(registry.collect())
    if vllm is not None:
        families += vllm.families(families)
    return generate_latest(_Collected(families))


def start_at_zero(metric: Counter | Gauge, *values: Iterable[str]) -> None:
    """Export the children with these label values before anything has happened.

    A series that begins with its first event has no rate at that event, and panels and alerts of
    what never happens have no data.
    """
    for labels in itertools.product(*values):
        metric.labels(*labels)


def gauge_of(
    registry: CollectorRegistry, name: str, documentation: str, read: Callable[[], float]
) -> None:
    """A gauge that calls ``read`` at each scrape; ``read`` must be cheap and thread-safe."""
    Gauge(name, documentation, registry=registry).set_function(read)


@dataclass(frozen=True, slots=True)
class _ReadCounter(Collector):
    name: str
    documentation: str
    read: Callable[[], float]

    def collect(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self.name, self.documentation, value=self.read())]

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self.name, self.documentation)]


def counter_of(
    registry: CollectorRegistry, name: str, documentation: str, read: Callable[[], float]
) -> None:
    """A counter that somebody else counts; ``read`` is called at each scrape, as a gauge's is."""
    registry.register(_ReadCounter(name, documentation, read))


class MetricsServer:
    """Serves ``/metrics``, ``/health`` and ``/ready`` of a worker process."""

    def __init__(
        self,
        registry: CollectorRegistry,
        health: Callable[[], Mapping[str, str]] = dict,
        is_ready: Callable[[], bool] = lambda: True,
        vllm: VllmNames | None = None,
    ) -> None:
        """Listen nowhere yet.

        Args:
            registry: of the process.
            health: tells of each part what is wrong with it, empty where nothing is.
            is_ready: whether routers send it requests.
            vllm: what is exported under vLLM's names, too.
        """
        self._registry = registry
        self._report = health
        self._is_ready = is_ready
        self._vllm = vllm
        self._runner: web.AppRunner | None = None

    async def start(self, listen: Listen, context: ssl.SSLContext | None = None) -> int:
        """Listen, with TLS where there is a ``context``; returns the port.

        Raises:
            ConfigError: something else listens there.
        """
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, listen.bind, listen.port, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            problem = f"cannot listen on {listen.bind} ({error.strerror})"
            raise ConfigError("--metrics-port", listen.port, problem, "a free port") from error
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def stop(self) -> None:
        """Close the listener; harmless where it never started."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        body = render_metrics(self._registry, self._vllm)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _ready(self, _: web.Request) -> web.Response:
        is_ready = self._is_ready()
        return web.json_response({"ready": is_ready}, status=200 if is_ready else 503)

    async def _health(self, _: web.Request) -> web.Response:
        report = self._report()
        is_ok = not any(report.values())
        parts = {part: problem or "ok" for part, problem in report.items()}
        body = {"status": "ok" if is_ok else "failed", "parts": parts}
        return web.json_response(body, status=200 if is_ok else 503)
