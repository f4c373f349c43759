"""``/health`` and ``/ready`` of a host's ranks together, for the one who looks after the whole.

Plain HTTP, also with TLS: a kubelet has no certificate, and learns nothing but who lives.
"""

from __future__ import annotations

from aiohttp import web

from deploy.hosts.ranks import HostRanks
from runtime.errors import ConfigError
from runtime.net.credentials import Listen


class HostHealth:
    """The server; it asks the ranks nothing itself, so that an answer takes no time."""

    def __init__(self, ranks: HostRanks) -> None:
        """Serve nothing yet."""
        self._ranks = ranks
        self._runner: web.AppRunner | None = None

    async def start(self, listen: Listen) -> None:
        """Listen.

        Raises:
            ConfigError: something else does there.
        """
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, listen.bind, listen.port).start()
        except OSError as error:
            problem = f"cannot listen on {listen.bind} ({error.strerror})"
            raise ConfigError("--health-port", listen.port, problem, "a free port") from error

    async def stop(self) -> None:
        """Close the listener; harmless where it never started."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        problems = self._ranks.health()
        is_ok = not any(problems.values())
        ranks = {name: problem or "ok" for name, problem in problems.items()}
        body = {"status": "ok" if is_ok else "failed", "ranks": ranks}
        return web.json_response(body, status=200 if is_ok else 503)

    async def _ready(self, _: web.Request) -> web.Response:
        ranks = self._ranks.readiness()
        is_ready = bool(ranks) and all(ranks.values())
        body = {"ready": is_ready, "ranks": dict(ranks)}
        return web.json_response(body, status=200 if is_ready else 503)
