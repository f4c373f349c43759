"""`tandem drain` against ranks that are empty, slow, gone, or not there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import pytest

from deploy.cli import main as tandem
from deploy.control.events import EventLog
from deploy.control.service import ControllerServer, serve_controller
from deploy.plan import RunContext
from deploy.running.fleet import Fleet, FleetTimes
from deploy.state import ClusterState, Phase, run_dir_of
from deploy.views.pool_watch import PoolWatch
from runtime.config.file import dump_config
from runtime.net.credentials import Credentials, Listen
from runtime.pb import (
    common_pb2,
    decode_pb2_grpc,
    prefill_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from runtime.rpc.grpc_calls import bind_port, create_server
from runtime.rpc.wire import own_wire
from tests.deploy.fake_role import FakeRegistry
from tests.deploy.fakes import LocalLauncher, fake_config, fake_context

HOST = "127.0.0.1"
CREDENTIALS = Credentials.of_secret("a secret of tests")
T = TypeVar("T")


class FakeRank(decode_pb2_grpc.DecodeServicer, prefill_pb2_grpc.PrefillServicer):
    """Says what `left` says, one after the other; the last for ever."""

    def __init__(self, *left: int) -> None:
        self.left = list(left)
        self.deadlines: list[float] = []

    async def Drain(
        self, request: common_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.DrainResponse:
        self.deadlines.append(request.deadline_s)
        left = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return common_pb2.DrainResponse(num_requests_left=left)


class FakeCluster:
    """A registry, ranks that the controller did not start, and the controller's service, on an
    event loop of their own: the command under test blocks.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._servers: list[grpc.aio.Server] = []
        self._registry = self.do(self._make_registry())
        self._controller, self._watch = self.do(self._make_controller())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def add(self, instance: str, *ranks: FakeRank) -> None:
        for number, rank in enumerate(ranks):
            self.do(self._add(instance, number, rank))

    @property
    def controller_address(self) -> str:
        return self._controller.address

    def close(self) -> None:
        self.do(self._watch.close())
        self.do(self._controller.close(goes_on=False))
        for server in self._servers:
            self.do(server.stop(None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _make_registry(self) -> FakeRegistry:
        registry = FakeRegistry()
        server = create_server(CREDENTIALS)
        registry_pb2_grpc.add_RegistryServicer_to_server(registry, server)
        self.control_address = await self._serve(server)
        return registry

    async def _make_controller(self) -> tuple[ControllerServer, PoolWatch]:
        watch = PoolWatch(self.control_address, self._context.endpoint, CREDENTIALS)
        watch.start()
        events = EventLog()
        times = FleetTimes(start_s=1.0, grace_s=1.0)
        fleet = Fleet(self._context, LocalLauncher(), watch, events, times)
        fleet.instances.clear()
        return await serve_controller(fleet, events), watch

    async def _add(self, instance: str, number: int, rank: FakeRank) -> None:
        server = create_server(CREDENTIALS)
        decode_pb2_grpc.add_DecodeServicer_to_server(rank, server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(rank, server)
        is_prefill = instance.startswith("prefill")
        record = registry_pb2.WorkerRecord(
            identity=common_pb2.WorkerIdentity(instance=instance, epoch=5, rank=number),
            role=common_pb2.ROLE_PREFILL if is_prefill else common_pb2.ROLE_DECODE,
            # A rank that is nothing is one that is gone.
            address=await self._serve(server) if rank.left else f"{HOST}:1",
        )
        request = registry_pb2.RegisterRequest(worker=record, wire=own_wire())
        await self._registry.Register(request, None)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while (instance, number) not in self._watch.members:
                await asyncio.sleep(0.01)

    async def _serve(self, server: grpc.aio.Server) -> str:
        address = f"{HOST}:{bind_port(server, Listen(bind=HOST), CREDENTIALS)}"
        await server.start()
        self._servers.append(server)
        return address


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """The only one that runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = fake_config(tmp_path)
    run_dir = run_dir_of(config.cluster.name, "")
    run_dir.create()
    run_dir.config_path.write_text(dump_config(config), encoding="utf-8")
    run_dir.write_secret(CREDENTIALS.secret)
    context = dataclasses.replace(fake_context(config, tmp_path), credentials=CREDENTIALS)
    with contextlib.closing(FakeCluster(context)) as cluster, run_dir.locked():
        run_dir.write_state(
            ClusterState(
                name=config.cluster.name,
                run_id="1",
                pid=1,
                phase=Phase.READY,
                endpoint="http://127.0.0.1:1/v1",
                control_address=cluster.control_address,
                controller_address=cluster.controller_address,
                model="m",
                started=0.0,
            )
        )
        yield cluster


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_all_ranks_are_drained_and_what_is_left_is_told(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    ranks = (FakeRank(3, 2, 0), FakeRank(0))
    other = FakeRank(7)
    cluster.add(f"{role}-0", *ranks)
    cluster.add(f"{role}-1", other)
    assert tandem(["drain", f"{role}-0", "--deadline", "600"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == f"drain {role}-0"
    assert lines[-2].endswith(f"{role}-0: 0 requests left")
    assert lines[-1].endswith(f" s: {role}-0 is empty")
    assert f"{role}-0: 3 requests left" in captured.out
    assert captured.err == ""
    assert all(500 < rank.deadlines[0] <= 600 for rank in ranks)
    assert ranks[0].deadlines == sorted(ranks[0].deadlines, reverse=True), "one deadline"
    assert other.deadlines == []


def test_what_is_not_empty_in_time_ends_with_one(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.drain.SETTLE_S", 0.2)
    cluster.add("decode-0", FakeRank(1), FakeRank(0))
    assert tandem(["drain", "decode-0", "--deadline", "0"]) == 1
    captured = capsys.readouterr()
    assert "is empty" not in captured.out
    assert "warning: decode-0/0 still has 1 request\n" in captured.err
    assert "error: decode-0 is not empty" in captured.err
    assert "no other decode instance takes requests" in captured.out


def test_a_rank_that_is_gone_does_not_keep_the_others_from_draining(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    left = FakeRank(2, 0)
    cluster.add("decode-0", FakeRank(), left)
    assert tandem(["drain", "decode-0"]) == 1
    assert "decode-0/0 at 127.0.0.1:1: UNAVAILABLE" in capsys.readouterr().err
    assert len(left.deadlines) == 2


def test_an_unknown_instance_is_answered_with_those_that_are(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.add("decode-0", FakeRank(0))
    cluster.add("prefill-0", FakeRank(0))
    assert tandem(["drain", "decode-7"]) == 2
    error = capsys.readouterr().err
    assert error == "error: there is no instance 'decode-7'. Fix: one of decode-0, prefill-0\n"


def test_a_time_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("-1", "inf", "nan", "soon"):
        with pytest.raises(SystemExit, match="2"):
            tandem(["drain", "decode-0", "--deadline", text])
        assert "0 or more seconds" in capsys.readouterr().err
