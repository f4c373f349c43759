"""Startup, readiness and liveness probes, as a kubelet makes them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp

from tests.pods.container import Container
from tests.pods.manifests import Manifest, ManifestError

KINDS = ("startupProbe", "readinessProbe", "livenessProbe")


def port_of(container: Manifest, port: int | str) -> int:
    """The number of a port that may be given by the name that a container has for it.

    Raises:
        ManifestError: it has none.
    """
    if isinstance(port, int):
        return port
    for one in container.get("ports") or ():
        if one.get("name") == port:
            return int(one["containerPort"])
    raise ManifestError(f"container {container['name']} has no port named {port!r}")


class Probe:
    """One probe of one container, with the numbers of its successes and failures in a row."""

    def __init__(self, spec: Mapping[str, Any], container: Manifest, address: str) -> None:
        """``address`` is the pod's."""
        self._spec = spec
        self._container = container
        self._address = address
        self.delay_s = float(spec.get("initialDelaySeconds", 0))
        self.period_s = float(spec.get("periodSeconds", 10))
        self._timeout_s = float(spec.get("timeoutSeconds", 1))
        self._needed = int(spec.get("successThreshold", 1))
        self._tolerated = int(spec.get("failureThreshold", 3))
        self._num_good = self._num_bad = 0
        self.trouble = ""
        """Of the last failure."""

    @property
    def is_passed(self) -> bool:
        """Whether it succeeded often enough in a row."""
        return self._num_good >= self._needed

    @property
    def has_failed(self) -> bool:
        """Whether it failed too often in a row."""
        return self._num_bad >= self._tolerated

    async def make(self, running: Container) -> None:
        """Once."""
        try:
            async with asyncio.timeout(self._timeout_s):
                self.trouble = await self._ask(running)
        except TimeoutError:
            self.trouble = f"no answer within {self._timeout_s:g} s"
        except (OSError, aiohttp.ClientError) as error:
            self.trouble = str(error)
        self._num_good = 0 if self.trouble else self._num_good + 1
        self._num_bad = self._num_bad + 1 if self.trouble else 0

    async def _ask(self, running: Container) -> str:
        spec = self._spec
        if "httpGet" in spec:
            return await http_get(spec["httpGet"], self._container, self._address)
        if "tcpSocket" in spec:
            port = port_of(self._container, spec["tcpSocket"]["port"])
            _, writer = await asyncio.open_connection(self._address, port)
            writer.close()
            return ""
        if "exec" in spec:
            status = await running.run_inside(spec["exec"]["command"], self._timeout_s)
            return f"exit status {status}" if status else ""
        raise ManifestError(f"probe {spec}: not known here")


async def http_get(spec: Mapping[str, Any], container: Manifest, address: str) -> str:
    """What is wrong with the answer; certificates are not looked at, as by a kubelet."""
    scheme = str(spec.get("scheme", "HTTP")).lower()
    host = spec.get("host", address)
    url = f"{scheme}://{host}:{port_of(container, spec['port'])}{spec.get('path', '/')}"
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as answer:
        if 200 <= answer.status < 400:
            return ""
        return f"HTTP {answer.status}: {(await answer.text())[:300]}"
