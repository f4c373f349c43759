"""A role that serves nothing, and what it is asked for, in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups
from runtime.net.credentials import Listen
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc.grpc_calls import bind_port, create_server
from tests.decode.cluster import CREDENTIALS, HOST, FakeRegistry, make_options
from worker.host import Endpoint, HostedRank, WorkerHost


class FakeLoop:
    """An engine loop that ends when it is told to, unless it hangs."""

    def __init__(self, log: list[str]) -> None:
        self.ended: Future[BaseException | None] = Future()
        self.other_leaves: Future[None] = Future()
        self.hangs = False
        self.stop_timeout_s = 0.0
        self._log = log

    def start(self) -> None:
        self._log.append("start")

    def stop(self, timeout_s: float) -> bool:
        self._log.append("stop")
        self.stop_timeout_s = timeout_s
        if not self.hangs and not self.ended.done():
            self.ended.set_result(None)
        return self.ended.done()


class FakeDriver:
    """One rank of `num_ranks`."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.log: list[str] = []
        self.may_drain = asyncio.Event()
        self.may_drain.set()
        self.loop = FakeLoop(self.log)
        self.load: Callable[[], registry_pb2.WorkerLoad] = registry_pb2.WorkerLoad
        self._dims = ParallelDims(dp=num_ranks, ep=num_ranks)

    def boot(self) -> HostedRank:
        return HostedRank(
            groups=ProcessGroups(dims=self._dims),
            epoch=5,
            max_model_len=64,
            close_transfer=lambda: self.log.append("close transfer"),
            close_model=lambda: self.log.append("close model"),
            settle=lambda: self.log.append("settle"),
        )

    def build(
        self, host: WorkerHost, closing: contextlib.AsyncExitStack
    ) -> tuple[FakeLoop, Endpoint]:
        self.log.append("build")
        closing.callback(self.log.append, "close role")

        async def flush() -> None:
            self.log.append("flush")

        async def drain(deadline_s: float) -> None:
            self.log.append(f"drain {deadline_s:g}")
            await self.may_drain.wait()

        endpoint = Endpoint(
            serve=lambda server, calls, address: self.log.append("serve"),
            record=registry_pb2.WorkerRecord(num_parts=3),
            load=lambda: self.load(),
            refuse=lambda: self.log.append("refuse"),
            drain=drain,
            flush=flush,
        )
        return self.loop, endpoint


@contextlib.asynccontextmanager
async def hosted(
    driver: FakeDriver, **options: Any
) -> AsyncIterator[tuple[WorkerHost, FakeRegistry]]:
    """A host that has started up, and the registry that it is in."""
    registry, router = FakeRegistry(), create_server(CREDENTIALS)
    registry_pb2_grpc.add_RegistryServicer_to_server(registry, router)
    address = f"{HOST}:{bind_port(router, Listen(bind=HOST), CREDENTIALS)}"
    await router.start()
    host = WorkerHost(replace(make_options(address), **options), driver)
    try:
        await host.startup()
        yield host, registry
    finally:
        await host.shutdown()
        await router.stop(None)
