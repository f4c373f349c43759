"""The controller with real processes of fake roles and no Ray: start, watch, restart, stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.control.membership import add_instance
from deploy.controller import Controller
from deploy.errors import ClusterError, ProcessDiedError
from deploy.plan import Role
from deploy.running.sweep import find_processes
from deploy.state import Phase, ProcessState
from runtime.net.roles import Role as Callee
from runtime.net.roles import role_secret
from tests.deploy.fakes import LocalLauncher, fake_config, fake_context
from tests.waiting import until


class Run:
    """A controller, the last state it told, and its task."""

    def __init__(
        self,
        folder: Path,
        *,
        grace_s: float = 5.0,
        timeout_s: float = 60.0,
        former: Run | None = None,
        **sizes: int,
    ) -> None:
        self.context = (
            former.context if former else fake_context(fake_config(folder, **sizes), folder)
        )
        self.launcher = former.launcher if former else LocalLauncher()
        self.phase = Phase.STARTING
        self.processes: dict[str, ProcessState] = {}
        self.controller = Controller(
            self.context,
            self.launcher,
            on_change=self._take,
            timeout_s=timeout_s,
            grace_s=grace_s,
            former=tuple(former.processes.values()) if former else (),
        )

    def _take(self, phase: Phase, processes: Sequence[ProcessState]) -> None:
        self.phase = phase
        self.processes = {process.name: process for process in processes}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ready inside the block, stopped after it."""
        task = asyncio.create_task(self.controller.run())
        try:
            await until(lambda: self.phase is Phase.READY or task.done())
            if not task.done():
                yield
        finally:
            self.controller.request_stop()
            await task


async def test_a_cluster_starts_and_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, prefill_tp=2, decode_dp=2)
    async with run.running():
        names = {"router", "prefill-0/0", "prefill-0/1", "decode-0/0", "decode-0/1"}
        assert set(run.processes) == names
        assert all(process.phase is Phase.READY for process in run.processes.values())
        pids = {process.pid for process in run.processes.values()}
        assert {found.pid for found in find_processes(run.context.run_id)} == pids
        logs = [Path(run.processes[f"decode-0/{rank}"].log_path).read_text() for rank in (0, 1)]
        found = [re.findall(r"serving rendezvous=(127\.0\.0\.1:\d+)", log) for log in logs]
        assert len(found[0]) == 1
        assert found[0] == found[1]
    assert run.phase is Phase.STOPPING
    assert find_processes(run.context.run_id) == []


async def test_no_command_line_shows_the_secret_and_logs_are_read_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path)
    async with run.running():
        for process in find_processes(run.context.run_id):
            assert run.context.credentials.secret not in " ".join(process.cmdline())
            given = process.environ()["TANDEM_SECRET"]
            role = Callee(given.partition("/")[0])
            assert role in process.name() + " ".join(process.cmdline())
            assert given == role_secret(run.context.credentials.secret, role)
        assert run.context.credentials.secret not in run.context.config_path.read_text()

        whole = await run.controller.fleet.read_log("decode-0", 0, 10**6)
        assert b"serving rendezvous" in whole.data
        assert (await run.controller.fleet.read_log("decode-0", whole.end, 99)).data == b""
        last = await run.controller.fleet.read_log("decode-0", -5, 99)
        assert (last.offset, last.data) == (whole.end - 5, whole.data[-5:])
        with pytest.raises(ClusterError, match=r"no process 'decode-9'. Fix: .*decode-0"):
            await run.controller.fleet.read_log("decode-9", 0, 99)


async def test_a_death_at_start_ends_the_start_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DECODE_0", "exit-at-start")
    run = Run(tmp_path)
    with pytest.raises(ProcessDiedError, match="decode-0 ended with status 3") as raised:
        async with run.running():
            pytest.fail("it cannot become ready")
    assert "this device is on fire" in str(raised.value)
    assert find_processes(run.context.run_id) == []


async def test_a_start_that_takes_too_long_names_who_is_late(tmp_path: Path) -> None:
    run = Run(tmp_path, timeout_s=0)
    with pytest.raises(ClusterError, match=r"not ready after 0 s; still starting: router"):
        async with run.running():
            pytest.fail("it cannot become ready")
    assert find_processes(run.context.run_id) == []


@pytest.mark.slow
async def test_a_killed_process_comes_back_with_its_instance(tmp_path: Path) -> None:
    run = Run(tmp_path, decode_dp=2)
    async with run.running():
        for victim in ("router", "prefill-0", "decode-0/1"):
            before = dict(run.processes)
            instance = victim.split("/")[0]
            os.kill(before[victim].pid, signal.SIGKILL)
            await until(lambda before=before, instance=instance: _is_back(run, before, instance))
            for name, process in run.processes.items():
                same_instance = process.instance == instance
                assert (process.pid != before[name].pid) is same_instance
                assert process.num_restarts == before[name].num_restarts + same_instance
            assert run.launcher.launched.count(instance) == 2
            pids = {process.pid for process in run.processes.values()}
            assert {found.pid for found in find_processes(run.context.run_id)} == pids
        assert [process.num_restarts for process in run.processes.values()] == [1] * 4
    assert find_processes(run.context.run_id) == []


@pytest.mark.slow
async def test_a_router_that_is_killed_comes_back_beside_the_other(tmp_path: Path) -> None:
    run = Run(tmp_path, routers=2)
    async with run.running():
        for victim in ("router-1", "router"):
            before = dict(run.processes)
            os.kill(before[victim].pid, signal.SIGKILL)
            await until(lambda before=before, victim=victim: _is_back(run, before, victim))
            others = set(before) - {victim}
            assert all(run.processes[name].pid == before[name].pid for name in others)
        assert {process.num_restarts for process in run.processes.values()} == {0, 1}
    assert find_processes(run.context.run_id) == []


@pytest.mark.slow
async def test_an_instance_that_others_stop_may_finish_and_comes_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_DECODE_0", "last-rank-is-late")
    run = Run(tmp_path, decode_dp=2, grace_s=60.0)
    async with run.running():
        for count in (1, 2):
            before = dict(run.processes)
            for rank in (0, 1):
                os.kill(before[f"decode-0/{rank}"].pid, signal.SIGTERM)
            await until(lambda before=before: _is_back(run, before, "decode-0"))
            log = Path(run.processes["decode-0/1"].log_path).read_text()
            assert log.count("answered all") == count, "it was not killed"
        pauses = [line for line in caplog.messages if "ended with status 0" in line]
        assert len(pauses) == 2
        assert all(line.endswith("pause_s=0.5") for line in pauses), "an update is no failure"


def _is_back(run: Run, before: dict[str, ProcessState], instance: str) -> bool:
    mine = [one for one in run.processes.values() if one.instance == instance]
    return bool(mine) and all(
        one.phase is Phase.READY and one.pid not in (0, before[one.name].pid) for one in mine
    )


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DECODE_0", "ignore-sigterm")
    run = Run(tmp_path, grace_s=0.5)
    async with run.running():
        began = time.monotonic()
    assert 0.5 <= time.monotonic() - began < 30
    assert find_processes(run.context.run_id) == []


async def test_a_second_request_to_stop_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ROUTER", "ignore-sigterm")
    run = Run(tmp_path, grace_s=60)
    async with run.running():
        run.controller.request_stop()
        began = time.monotonic()
    assert time.monotonic() - began < 30  # of 60 s of grace
    assert find_processes(run.context.run_id) == []


@pytest.mark.slow
async def test_an_instance_whose_host_is_lost_is_placed_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, decode_dp=2)
    async with run.running():
        before = dict(run.processes)
        run.launcher.lose("decode-0")
        await until(lambda: _is_back(run, before, "decode-0"))
        assert run.launcher.released == ["decode-0"]
        assert run.launcher.launched.count("decode-0") == 2


async def test_an_instance_without_room_says_so_and_comes_back_when_there_is(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    async with run.running():
        before = dict(run.processes)
        run.launcher.has_room.clear()
        run.launcher.lose("decode-0")
        await until(lambda: "no room" in run.processes["decode-0"].stage)
        assert run.processes["decode-0"].phase is Phase.RESTARTING
        assert run.processes["prefill-0"].phase is Phase.READY
        run.launcher.has_room.set()
        await until(lambda: _is_back(run, before, "decode-0"))
        assert "no room" not in run.processes["decode-0"].stage


async def test_a_cluster_that_finds_no_room_at_its_start_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.launcher.has_room.clear()
    with pytest.raises(ClusterError, match="no room"):
        async with run.running():
            pytest.fail("it cannot become ready")


async def test_a_later_controller_takes_over_what_runs(tmp_path: Path) -> None:
    first = Run(tmp_path, decode_dp=2)
    task = asyncio.create_task(first.controller.run())
    await until(lambda: first.phase is Phase.READY or task.done())
    first.controller.request_leave()
    await task
    assert first.controller.goes_on
    assert all(one.phase is Phase.READY for one in first.processes.values())
    (gone,) = first.launcher.running.pop("prefill-0")
    await gone.supervisor.kill()

    second = Run(tmp_path, former=first)
    async with second.running():
        await until(lambda: _is_back(second, first.processes, "prefill-0"))
        for name, process in second.processes.items():
            is_new = name == "prefill-0"
            assert (process.pid != first.processes[name].pid) is is_new
            assert process.num_restarts == int(is_new)
        await until(lambda: all(p.phase is Phase.READY for p in second.processes.values()))
    assert not second.controller.goes_on
    assert find_processes(first.context.run_id) == []


async def test_a_later_controller_finds_what_operators_changed(tmp_path: Path) -> None:
    """Instances that were added keep their names, and what was drained is not started again."""
    first = Run(tmp_path)
    task = asyncio.create_task(first.controller.run())
    await until(lambda: first.phase is Phase.READY or task.done())
    fleet = first.controller.fleet
    await add_instance(fleet, Role.DECODE, "decode-4", lambda stage: None)
    drained = fleet.find("decode-0")
    drained.is_set_aside, drained.phase = True, Phase.DRAINED
    first.controller.request_leave()
    await task
    first.processes = {state.name: state for state in fleet.process_states()}

    second = Run(tmp_path, former=first)
    async with second.running():
        await until(lambda: second.processes["decode-4"].phase is Phase.READY)
        assert {name: process.pid for name, process in second.processes.items()} == {
            name: process.pid for name, process in first.processes.items()
        }
        os.kill(first.processes["decode-0"].pid, signal.SIGKILL)
        await until(lambda: second.processes["decode-0"].phase is Phase.STOPPED)
        assert second.launcher.launched.count("decode-0") == 1
    assert find_processes(first.context.run_id) == []
