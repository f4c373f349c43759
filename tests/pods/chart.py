"""A release of the chart in the harness, and the load that tests put on it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.helm.rendering import Values, pod_template, render
from tests.integration.client import stream
from tests.pods.cluster import PodCluster
from tests.pods.manifests import Manifests

NAME = "demo"
NAMESPACE = "serving"
DECODE, PREFILL = f"{NAME}-tandem-decode", f"{NAME}-tandem-prefill"
ROUTER = f"{NAME}-tandem-router"
MODEL = "tandem-python"
NUM_LANES = 3
NUM_TOKENS = 32
PERIOD_S = 0.5


def release_of(values: Values, name: str = NAME) -> list[dict[str, Any]]:
    """The manifests, but for probes, which are made more often to keep tests short."""
    release = render(values, name=name, namespace=NAMESPACE)
    objects = copy.deepcopy([*release.manifests, *release.hooks])
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet"):
            for container in pod_template(one)["spec"]["containers"]:
                hurry(container)
    return objects


def hurry(container: dict[str, Any]) -> None:
    """Probe often; as many seconds as before until a container has failed."""
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe := container.get(kind):
            failures = probe["failureThreshold"] * probe["periodSeconds"]
            probe["failureThreshold"] = round(failures / PERIOD_S)
            probe["periodSeconds"] = PERIOD_S


def cluster_of(objects: list[dict[str, Any]], folder: Path) -> PodCluster:
    return PodCluster(Manifests.of(objects, NAMESPACE), folder)


@dataclass(slots=True)
class Load:
    """Streams one after the other in several lanes, until they are told that it is enough."""

    url: str
    model: str = MODEL
    key: str = ""
    """The API key, where one is asked for."""
    num_whole: int = 0
    failed: list[str] = field(default_factory=list)
    _is_over: bool = False

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Streams come and go in the block; on its end all are over."""
        timeout = aiohttp.ClientTimeout(total=300)
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        async with (
            aiohttp.ClientSession(self.url, timeout=timeout, headers=headers) as session,
            asyncio.TaskGroup() as group,
        ):
            for lane in range(NUM_LANES):
                group.create_task(self._lane(session, lane))
            try:
                yield
            finally:
                self._is_over = True

    async def some_more(self, count: int = NUM_LANES) -> None:
        """Wait until so many more are over."""
        target = self.num_whole + count
        async with asyncio.timeout(240):
            while self.num_whole < target:
                assert self.failed == []
                await asyncio.sleep(0.05)

    async def _lane(self, session: aiohttp.ClientSession, lane: int) -> None:
        number = 0
        while not self._is_over:
            number += 1
            try:
                answer = await stream(
                    session,
                    f"def lane_{lane}_{number}(value):",
                    model=self.model,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                    temperature=0,
                )
            except (aiohttp.ClientError, AssertionError) as error:
                self.failed.append(repr(error))
                return
            if answer.error is None and len(answer.token_ids) == NUM_TOKENS:
                self.num_whole += 1
            else:
                self.failed.append(f"{answer.request_id}: {answer.error}")


async def in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    """While the streams go on."""
    return await asyncio.to_thread(work, *arguments)
