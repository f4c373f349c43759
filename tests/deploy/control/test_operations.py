"""Commands that change a cluster that runs: a real controller, processes of fake roles, no Ray.

One cluster serves all tests of this file; each leaves one prefill and one decode instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main as tandem
from deploy.commands.cluster.logs import log_source
from deploy.control.client import follow
from deploy.control.events import EventKind
from deploy.errors import ClusterError
from deploy.state import Phase, RunDir
from runtime.config.file import load_config
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.pb import controller_pb2 as pb
from runtime.pb import controller_pb2_grpc
from runtime.rpc.grpc_calls import open_channel
from tests.deploy.control.cluster import ControlledCluster
from tests.deploy.fakes import fake_config
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlledCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with ControlledCluster(fake_config(folder), folder).running() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: ControlledCluster) -> Iterator[ControlledCluster]:
    """One of each role, and room, before and after."""
    shared.launcher.room = 100
    yield shared
    shared.launcher.room = 100
    for role in ("prefill", "decode"):
        if len(shared.names(role)) > 1:
            assert run(shared, "scale", role, "1", "--deadline", "0") == 0
        wait_until(lambda role=role: len(shared.names(role)) == 1, "one is left")


def run(cluster: ControlledCluster, *words: str) -> int:
    """One command, on this cluster."""
    chosen = () if words[0] == "apply" else ("--config", cluster.config_file)
    return tandem([*words, *chosen])


def left_pool(cluster: ControlledCluster) -> list[str]:
    """Who left the router's pool."""
    return [event.instance for event in cluster.events() if event.kind is EventKind.LEFT]


def settled(cluster: ControlledCluster, names: list[str]) -> bool:
    """Whether these are the decode instances, and all serve, as the state file says."""
    decode = [one for one in cluster.processes.values() if one.role == "decode"]
    return cluster.names("decode") == names and all(one.phase is Phase.READY for one in decode)


def test_a_dry_run_shows_what_would_be_done_and_does_nothing(
    cluster: ControlledCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (cluster.pids(), list(cluster.launcher.launched))
    assert run(cluster, "scale", "decode", "3", "--dry-run") == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0] == "scale decode from 1 to 3"
    assert "start:   decode-1, decode-2" in output
    assert "P:D 1:3" in output
    assert run(cluster, "restart", "--rolling", "--dry-run", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    plan = json.loads(line)["plan"]
    assert plan["restart"] == ["prefill-0", "decode-0"]
    assert [size["instances"] for size in plan["sizes"]] == [1, 1]
    assert before == (cluster.pids(), cluster.launcher.launched)
    assert not [event for event in cluster.events() if event.who]


def test_a_role_grows_and_shrinks_and_the_others_notice_nothing(
    cluster: ControlledCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    before = cluster.pids()
    assert run(cluster, "scale", "decode", "3") == 0
    output = capsys.readouterr().out
    assert "decode-1 serves after" in output
    assert "decode-2 serves after" in output
    wait_until(lambda: settled(cluster, ["decode-0", "decode-1", "decode-2"]), "three decode")
    assert load_config(cluster.context.config_path).decode.instances == 3
    after = cluster.pids()
    assert {name: after[name] for name in before} == before

    released = len(cluster.launcher.released)
    assert run(cluster, "scale", "decode", "-2") == 0
    output = capsys.readouterr().out
    assert "decode-1, decode-2: 4 requests left, at most 140 tokens" in output
    wait_until(lambda: settled(cluster, ["decode-0"]), "one decode")
    assert cluster.pids() == before
    assert sorted(cluster.launcher.released[released:]) == ["decode-1", "decode-2"]
    assert load_config(cluster.context.config_path).decode.instances == 1
    wait_until(lambda: len(left_pool(cluster)) == 2, "they left")
    told = [(event.kind, event.text) for event in cluster.events() if "@" in event.who]
    assert (EventKind.SCALE, "scale decode from 1 to 3") in told
    assert (EventKind.DONE, "scale decode from 3 to 1: decode has 1") in told
    assert sorted(left_pool(cluster)) == ["decode-1", "decode-2"]


def test_a_new_instance_that_dies_is_told_and_the_cluster_goes_on(
    cluster: ControlledCluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_DECODE_1", "exit-at-start")
    before = cluster.pids()
    assert run(cluster, "scale", "decode", "+1") == 1
    error = capsys.readouterr().err
    assert "decode-1 ended with status 3" in error
    assert "this device is on fire" in error
    wait_until(lambda: cluster.pids() == before, "only the others are left")
    assert cluster.state.phase is Phase.READY
    assert cluster.launcher.released[-1] == "decode-1"
    assert load_config(cluster.context.config_path).decode.instances == 1


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("scale", "decode", "0"), 3, "decode.instances = 0: without decode nothing is served"),
        (("scale", "prefill", "-1"), 3, "prefill.instances = 0: without prefill nothing"),
        (("scale", "decode", "9"), 3, "decode.instances = 9: no room, 2 places are free. Fix: 3 "),
        (
            ("drain", "decode-7"),
            2,
            "there is no instance 'decode-7'. Fix: one of router,",
        ),
        (("restart", "decode-7"), 2, "there is no instance 'decode-7'"),
        (("restart", "decode"), 3, "all instances of decode would be away at once"),
        (("drain", "router"), 2, "router: the router cannot be drained"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(
    cluster: ControlledCluster,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    cluster.launcher.room = 2
    before = cluster.pids()
    assert run(cluster, *words) == status
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert "Fix: " in error
    assert cluster.pids() == before


def test_one_operation_at_a_time_has_a_role(
    cluster: ControlledCluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scale while an instance drains, and two scales at once."""
    monkeypatch.setenv("FAKE_DECODE_1", "never-empty")
    monkeypatch.setattr("deploy.drain.SETTLE_S", 0.5)
    first, second = Asked(cluster), Asked(cluster)
    first.begin(lambda stub: stub.Scale(pb.ScaleRequest(role="decode", count=2, who="ada@host")))
    first.wait_plan()
    second.begin(lambda stub: stub.Scale(pb.ScaleRequest(role="decode", count=3, who="bob@host")))
    refusal = second.wait_refused()
    assert "decode: another operation is at it: scale decode from 1 to 2, by ada@host" in refusal
    assert first.wait_outcome().ok

    drain = Asked(cluster)
    request = pb.DrainInstanceRequest(instance="decode-1", deadline_s=2.0, who="ada@host")
    drain.begin(lambda stub: stub.Drain(request))
    drain.wait_plan()
    assert run(cluster, "scale", "decode", "1") == 3
    assert "drain decode-1, by ada@host, since" in capsys.readouterr().err
    assert run(cluster, "scale", "prefill", "1") == 0, "another role is free"
    outcome = drain.wait_outcome()
    assert not outcome.ok
    assert "decode-1/0 still has 2 requests" in outcome.message
    assert run(cluster, "scale", "decode", "1", "--deadline", "0") == 0


def test_a_drained_instance_stays_empty_and_down_until_it_is_restarted(
    cluster: ControlledCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cluster, "scale", "decode", "2") == 0
    assert run(cluster, "drain", "decode-1") == 0
    output = capsys.readouterr().out
    assert "decode-1: 2 requests left, at most 70 tokens" in output
    assert "decode-1 is empty, and stays so until `tandem restart decode-1`" in output
    wait_until(
        lambda: cluster.processes["decode-1"].phase is Phase.DRAINED, "it is shown as drained"
    )
    os.kill(cluster.processes["decode-1"].pid, signal.SIGKILL)
    wait_until(lambda: cluster.processes["decode-1"].phase is Phase.STOPPED, "it is down")
    launched = cluster.launcher.launched.count("decode-1")
    assert run(cluster, "restart", "decode-1") == 0
    wait_until(lambda: settled(cluster, ["decode-0", "decode-1"]), "it is back")
    assert cluster.launcher.launched.count("decode-1") == launched + 1


def test_an_operation_goes_on_without_the_command_that_began_it(
    cluster: ControlledCluster,
) -> None:
    async def ask_and_leave() -> None:
        channel = open_channel(
            cluster.state.controller_address, cluster.context.credentials, Role.CONTROLLER
        )
        stub = controller_pb2_grpc.ControllerStub(channel)
        call = stub.Scale(pb.ScaleRequest(role="prefill", count=2, who="ada@host"))
        async for update in call:
            assert update.WhichOneof("news") == "plan"
            break
        call.cancel()
        await channel.close(None)

    asyncio.run(ask_and_leave())
    wait_until(lambda: cluster.names("prefill") == ["prefill-0", "prefill-1"], "it is there")
    done = "scale prefill from 1 to 2: prefill has 2"
    wait_until(lambda: done in [event.text for event in cluster.events()], "it serves")
    on_record = [one for one in cluster.events() if "scale prefill from 1 to 2" in one.text][-2:]
    assert [event.kind for event in on_record] == [EventKind.SCALE, EventKind.DONE]
    assert {event.who for event in on_record} == {"ada@host"}
    assert all(event.source.startswith("ipv4:127.0.0.1:") for event in on_record)


def test_what_is_refused_is_on_record(
    cluster: ControlledCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cluster, "restart", "decode-7") != 0
    event = [event for event in cluster.events() if event.kind is EventKind.REFUSED][-1]
    assert event.text.startswith("restart decode-7: ")
    assert event.text.removeprefix("restart decode-7: ") in capsys.readouterr().err
    assert event.who
    assert event.source.startswith("ipv4:127.0.0.1:")


def test_a_worker_cannot_act_as_who_runs_the_cluster(
    cluster: ControlledCluster, caplog: pytest.LogCaptureFixture
) -> None:
    secret = cluster.context.credentials.secret
    for role in (Role.PREFILL, Role.DECODE, Role.ROUTER):
        # Its own secret has nothing that is shown to the controller.
        worker = Credentials.of_secret(secret).of_role(role)
        with pytest.raises(ClusterError, match="UNAUTHENTICATED"):
            follow(
                *(cluster.state, worker),
                lambda stub: stub.Scale(pb.ScaleRequest(role="decode", count=2)),
                print,
            )
        # And with one that would be, the role is refused by name.
        named = Credentials(secret=secret, role=role)
        with pytest.raises(ClusterError, match=f"Controller.Scale is for controller, .* is {role}"):
            follow(
                *(cluster.state, named),
                lambda stub: stub.Scale(pb.ScaleRequest(role="decode", count=2)),
                print,
            )
    assert cluster.names("decode") == ["decode-0"]


def test_a_rolling_restart_starts_the_replacement_first_where_there_is_room(
    cluster: ControlledCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    before, begun = cluster.pids(), len(cluster.history)
    assert run(cluster, "restart", "--rolling") == 0
    output = capsys.readouterr().out
    assert "prefill-1 will take the place of prefill-0" in output
    wait_until(lambda: settled(cluster, ["decode-1"]), "the replacement")
    assert cluster.names("prefill") == ["prefill-1"]
    for processes in cluster.history[begun:]:
        for role in ("prefill", "decode"):
            ready = [p for p in processes.values() if p.role == role and p.phase is Phase.READY]
            assert ready, f"nobody of {role} served"
    assert set(cluster.pids().values()) & set(before.values()) == {before["router"]}


def test_a_rolling_restart_without_room_keeps_names_and_somebody_who_serves(
    cluster: ControlledCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cluster, "scale", "decode", "2") == 0
    names = cluster.names("decode")
    wait_until(lambda: settled(cluster, names), "two")
    cluster.launcher.room = 0
    before, begun = cluster.pids(), len(cluster.history)
    assert run(cluster, "restart", "--rolling", "decode") == 0
    wait_until(lambda: settled(cluster, names), "they are back")
    assert all(cluster.pids()[name] != before[name] for name in names)
    for processes in cluster.history[begun:]:
        assert any(p.role == "decode" and p.phase is Phase.READY for p in processes.values())
    cluster.launcher.room = 0
    capsys.readouterr()
    assert run(cluster, "restart", "--rolling") == 3
    assert "prefill has one instance that serves, and there is no room" in capsys.readouterr().err
    assert run(cluster, "restart", "prefill", "--allow-gap") == 0


def test_apply_shows_the_difference_and_rolls_what_reads_it(
    cluster: ControlledCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = load_config(cluster.context.config_path)
    wanted = dataclasses.replace(
        wanted,
        router=dataclasses.replace(wanted.router, port=0, control_port=0),
        prefill=dataclasses.replace(wanted.prefill, instances=2),
        decode=dataclasses.replace(wanted.decode, max_num_seqs=7),
    )
    path, before = cluster.write(wanted), cluster.pids()
    (decode,), (prefill,) = cluster.names("decode"), cluster.names("prefill")
    assert run(cluster, "apply", path, "--dry-run") == 0
    output = capsys.readouterr().out
    assert "decode.max_num_seqs: 'auto' -> 7   (rolling restart of decode)" in output
    assert "prefill.instances: 1 -> 2   (scale prefill)" in output
    assert cluster.pids() == before

    assert run(cluster, "apply", path) == 0
    wait_until(lambda: len(cluster.names("prefill")) == 2, "two prefill")
    assert cluster.pids()[prefill] == before[prefill], "its settings are the same"
    assert cluster.names("decode") != [decode]
    assert load_config(cluster.context.config_path).decode.max_num_seqs == 7
    assert run(cluster, "apply", path) == 0
    assert "nothing differs" in capsys.readouterr().out


def test_apply_refuses_what_cannot_change_and_disturbs_nobody(
    cluster: ControlledCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = cluster.pids()
    running = load_config(cluster.context.config_path)
    other = dataclasses.replace(
        running,
        prefill=dataclasses.replace(running.prefill, block_size=32),
        decode=dataclasses.replace(running.decode, block_size=32),
    )
    assert run(cluster, "apply", cluster.write(other)) == 2
    error = capsys.readouterr().err
    assert "prefill.block_size = 32: is 64 in the cluster that runs, and cannot change" in error
    assert "Fix: a second cluster" in error
    router = dataclasses.replace(running.router, queue_timeout_s=9.0)
    assert run(cluster, "apply", cluster.write(dataclasses.replace(running, router=router))) == 3
    assert "--allow-gap" in capsys.readouterr().err
    too_few = dataclasses.replace(running.decode, num_blocks=2)
    assert run(cluster, "apply", cluster.write(dataclasses.replace(running, decode=too_few))) == 2
    assert "decode.num_blocks = 2" in capsys.readouterr().err
    assert cluster.pids() == before


def test_an_apply_whose_first_instance_fails_leaves_the_former_settings(
    cluster: ControlledCluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (name,) = cluster.names("decode")
    before = cluster.pids()
    for index in range(3):
        monkeypatch.setenv(f"FAKE_DECODE_{index}", "exit-at-start")
    running = load_config(cluster.context.config_path)
    wanted = dataclasses.replace(
        running, decode=dataclasses.replace(running.decode, max_num_seqs=5)
    )
    assert run(cluster, "apply", cluster.write(wanted)) == 1
    assert "this device is on fire" in capsys.readouterr().err
    assert load_config(cluster.context.config_path) == running
    monkeypatch.undo()
    os.kill(before[name], signal.SIGKILL)
    wait_until(
        lambda: cluster.pids().get(name) not in (None, 0, before[name]), "it comes back as it was"
    )
    wait_until(lambda: settled(cluster, [name]), "it serves")


def test_events_are_told_and_followed(
    cluster: ControlledCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cluster, "events", "--last", "1000", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"started", "ready", "joined"} <= {event["kind"] for event in events}
    heard = Asked(cluster)
    heard.begin(lambda stub: stub.Events(pb.EventsRequest(follow=True, most=1)))
    assert run(cluster, "scale", "decode", "1") == 0
    wait_until(lambda: any(e.kind == "done" for e in heard.messages[1:]), "the end of an operation")


def test_status_is_shown_again_and_again(
    cluster: ControlledCluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("deploy.commands.cluster.status.time.sleep", pause)
    assert run(cluster, "status", "--watch", "0.5", "--json") == 130
    views = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [view["phase"] for view in views] == ["ready"] * 3
    assert pauses == [0.5] * 3


def test_a_log_is_read_in_parts(cluster: ControlledCluster) -> None:
    def read(**values: Any) -> pb.ReadLogResponse:
        return ask(cluster, lambda stub: stub.ReadLog(pb.ReadLogRequest(**values)))

    part = read(process="router", offset=0, max_bytes=10)
    assert len(part.data) == 10
    rest = read(process="router", offset=len(part.data))
    path = Path(cluster.processes["router"].log_path)
    assert path.read_bytes().startswith(part.data + rest.data)
    assert rest.offset == 10
    assert path.read_bytes().endswith(read(process="router", offset=-5).data)
    with pytest.raises(Exception, match="there is no process 'decode-9'"):
        read(process="decode-9")


def test_logs_of_other_hosts_are_read_through_the_controller(
    cluster: ControlledCluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = Path(cluster.processes["router"].log_path)
    elsewhere = dataclasses.replace(
        cluster.state,
        processes=tuple(
            # A path that means nothing here: only whoever asks the controller can read it.
            dataclasses.replace(one, host="192.0.2.7", log_path=f"/elsewhere/{one.name}.log")
            for one in cluster.state.processes
        ),
    )
    monkeypatch.setattr(RunDir, "read_state", lambda _: elsewhere)
    assert run(cluster, "logs", "router", "--lines", "2") == 0
    assert set(capsys.readouterr().out.splitlines()) <= set(path.read_text().splitlines())
    with contextlib.closing(log_source(cluster.run_dir)) as logs:
        position = logs.tail("router", 0).position
        with path.open("a") as log:
            log.write("one more line\nand the beginning")
        assert "one more line" in logs.read("router", position).lines
        assert logs.read("router", 10**9).position == 0


def test_whoever_has_no_secret_is_refused(cluster: ControlledCluster) -> None:
    with pytest.raises(ClusterError, match="UNAUTHENTICATED"):
        follow(
            cluster.state,
            Credentials.of_secret("another"),
            lambda stub: stub.Events(pb.EventsRequest()),
            print,
        )


def ask(cluster: ControlledCluster, call: Any) -> Any:
    """One answer."""

    async def run() -> Any:
        channel = open_channel(
            cluster.state.controller_address, cluster.context.credentials, Role.CONTROLLER
        )
        try:
            return await call(controller_pb2_grpc.ControllerStub(channel))
        finally:
            await channel.close(None)

    return asyncio.run(run())


class Asked:
    """A call that streams, in a thread of its own."""

    def __init__(self, cluster: ControlledCluster) -> None:
        self._cluster = cluster
        self.messages: list[Any] = []
        self.error: ClusterError | None = None
        self._thread: threading.Thread | None = None

    def begin(self, call: Any) -> None:
        def work() -> None:
            cluster = self._cluster
            try:
                follow(cluster.state, cluster.context.credentials, call, self.messages.append)
            except ClusterError as error:
                self.error = error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def wait_plan(self) -> None:
        wait_until(lambda: bool(self.messages), "the plan")

    def wait_refused(self) -> str:
        wait_until(lambda: self.error is not None, "it is refused")
        return str(self.error)

    def wait_outcome(self) -> pb.Outcome:
        def ended() -> bool:
            return bool(self.messages) and self.messages[-1].WhichOneof("news") == "outcome"

        wait_until(ended, "its end")
        outcome: pb.Outcome = self.messages[-1].outcome
        return outcome
