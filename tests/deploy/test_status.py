"""``tandem status``: what it shows of state, registry and router, and how long that takes."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from deploy.checks.cluster import resolve_config
from deploy.commands.cluster.status import render
from deploy.plan import Role
from deploy.state import ClusterState, Phase, ProcessState, RunDir
from deploy.views.cluster import (
    ClusterView,
    ProcessView,
    memory_of_trees,
    metrics_url,
    sum_of_routers,
)
from deploy.views.pool_watch import PoolMember
from runtime.config import ClusterConfig, ClusterSection, RouterSection
from runtime.config.file import dump_config
from runtime.net.credentials import Credentials
from runtime.pb import common_pb2, registry_pb2
from runtime.rpc.registration import RegistryClient
from tests.deploy.fakes import ROOT

RECENT = {
    "window_s": 7.0,
    "requests_per_s": 2.5,
    "prompt_tokens_per_s": 1200.0,
    "output_tokens_per_s": 85.5,
    "ttft_p50_s": 0.045,
    "ttft_p99_s": 1.25,
}


def process(name: str, role: Role, phase: Phase = Phase.READY, rank: int = 0) -> ProcessState:
    instance = name.partition("/")[0]
    return ProcessState(
        name=name, role=role.value, instance=instance, rank=rank, phase=phase, pid=7
    )


def member(role: Role, *, free: int, draining: bool = False) -> PoolMember:
    return PoolMember(
        epoch=1,
        role=role,
        address="127.0.0.1:1",
        num_requests_running=3,
        num_requests_waiting=1,
        num_free_blocks=free,
        num_total_blocks=100,
        draining=draining,
    )


def state_of(processes: list[ProcessState], **changes: object) -> ClusterState:
    values = {
        "name": "one",
        "run_id": "1",
        "pid": 1,
        "phase": Phase.READY,
        "endpoint": "http://127.0.0.1:8000/v1",
        "control_address": "127.0.0.1:2",
        "model": "m",
        "started": time.time() - 3700,
        "log_dir": "/logs",
        "processes": tuple(processes),
    }
    return ClusterState(**{**values, **changes})  # type: ignore[arg-type]


def some_view() -> ClusterView:
    ranks = [process(f"decode-0/{rank}", Role.DECODE, rank=rank) for rank in range(2)]
    states = [
        process("router", Role.ROUTER),
        process("prefill-0", Role.PREFILL),
        process("prefill-1", Role.PREFILL, Phase.RESTARTING),
        *ranks,
    ]
    members = [
        None,
        member(Role.PREFILL, free=90),
        None,
        member(Role.DECODE, free=50),
        member(Role.DECODE, free=100, draining=True),
    ]
    views = [
        ProcessView(state=state, member=one, memory_bytes=2**20)
        for state, one in zip(states, members, strict=True)
    ]
    router = {"recent": RECENT, "num_requests_in_flight": 8, "num_requests_waiting": 2}
    return ClusterView(state=state_of(states), processes=views, router=router)


def text_of(view: ClusterView) -> str:
    output = io.StringIO()
    Console(file=output, width=80).print(render(view), crop=False)
    return output.getvalue()


def test_roles_have_load_rates_and_times_to_the_first_token() -> None:
    router, prefill, decode = some_view().roles()
    assert (router.num_running, router.num_waiting, router.kv_used) == (8, 2, None)
    assert (prefill.num_ready, prefill.num_instances) == (1, 2)
    assert (prefill.kv_used, prefill.tokens_per_s) == (0.1, 1200.0)
    assert (decode.num_ready, decode.num_instances) == (0, 1)  # one of its ranks drains
    assert (decode.num_running, decode.num_waiting) == (6, 2)
    assert (decode.kv_used, decode.tokens_per_s) == (0.25, 85.5)


def test_json_is_one_object_with_roles_instances_and_processes() -> None:
    found = json.loads(json.dumps(some_view().describe()))
    assert (found["name"], found["phase"]) == ("one", "restarting")
    assert found["recent"]["ttft_p99_s"] == 1.25
    assert found["roles"]["decode"]["kv_used"] == 0.25
    instances = {entry["name"]: entry for entry in found["instances"]}
    assert instances["decode-0"]["processes"] == ["decode-0/0", "decode-0/1"]
    assert instances["decode-0"]["draining"]
    assert instances["prefill-1"]["phase"] == "restarting"
    processes = {entry["name"]: entry for entry in found["processes"]}
    assert processes["decode-0/1"]["load"]["num_free_blocks"] == 100
    assert processes["router"]["load"] is None


def test_a_person_sees_roles_and_processes() -> None:
    lines = text_of(some_view()).splitlines()
    assert lines[0] == "one restarting  m at http://127.0.0.1:8000/v1"
    assert lines[1] == "up 1 h 1 min, logs in /logs, metrics at http://127.0.0.1:8000/metrics"
    rows = {line.split()[0]: line.split() for line in lines[2:] if line}
    text = text_of(some_view())
    assert "2.5 requests/s" in text
    assert "45 ms" in text
    assert rows["decode"][:5] == ["decode", "0/1", "6", "2", "25%"]
    assert rows["decode-0/1"][1] == "draining"


def test_hosts_are_shown_where_there_are_several() -> None:
    view = some_view()
    assert "host" not in text_of(view)
    hosts = ["10.0.0.1", "10.0.0.2", "", "10.0.0.3", "10.0.0.4"]
    views = [
        dataclasses.replace(one, state=dataclasses.replace(one.state, host=host))
        for one, host in zip(view.processes, hosts, strict=True)
    ]
    lines = text_of(dataclasses.replace(view, processes=views)).splitlines()
    rows = {line.split()[0]: line.split() for line in lines[2:] if line}
    assert rows["process"][:3] == ["process", "host", "state"]
    assert rows["decode-0/1"][:3] == ["decode-0/1", "10.0.0.4", "draining"]
    assert rows["prefill-1"][1] == "-"


def test_a_cluster_whose_router_does_not_answer_is_shown_without_figures() -> None:
    view = some_view()
    bare = [ProcessView(state=one.state) for one in view.processes]
    silent = ClusterView(state=view.state, processes=bare)
    assert silent.describe()["recent"] is None
    assert [role.num_running for role in silent.roles()] == [None, None, None]
    assert "requests/s" not in text_of(silent)


def test_several_routers_are_shown_as_one() -> None:
    idle = {**RECENT, "requests_per_s": 0.0, "ttft_p50_s": None, "ttft_p99_s": None}
    slow = {**RECENT, "ttft_p99_s": 3.0}
    answers = [
        {"recent": recent, "num_requests_in_flight": 2, "num_requests_waiting": 1, "workers": []}
        for recent in (RECENT, idle, slow)
    ]
    found = sum_of_routers(answers)
    assert (found["num_requests_in_flight"], found["num_requests_waiting"]) == (6, 3)
    assert found["recent"]["requests_per_s"] == 5.0
    assert found["recent"]["ttft_p50_s"] == 0.045
    assert found["recent"]["ttft_p99_s"] == 3.0
    assert sum_of_routers(answers[:1]) == answers[0]
    assert sum_of_routers([]) == {}


def model_row(name: str, *, waiting: int = 0, missing: tuple[str, ...] = ()) -> dict[str, object]:
    """As a router's ``/status`` tells of a model."""
    return {
        "name": name,
        "aliases": [f"also-{name}"],
        "missing": list(missing),
        "num_requests_in_flight": 2,
        "num_requests_waiting": waiting,
    }


def test_models_are_shown_where_there_are_several() -> None:
    view = some_view()
    one = dataclasses.replace(view, router={**view.router, "models": [model_row("a")]})
    assert "also-a" not in text_of(one)
    assert "models" not in one.describe()
    router = {
        **view.router,
        "models": [model_row("a", waiting=3), model_row("b", missing=("decode",))],
        "workers": [
            {"role": "prefill", "model": "a"},
            {"role": "decode", "model": "a"},
            {"role": "decode", "model": "a"},
            {"role": "prefill", "model": "b"},
        ],
    }
    several = dataclasses.replace(view, router=router)
    rows = {line.split()[0]: line.split() for line in text_of(several).splitlines() if line}
    assert rows["a"] == ["a", "yes", "2", "3", "1", "2", "also-a"]
    assert rows["b"] == ["b", "no", "2", "0", "1", "0", "also-b"]
    told = json.loads(json.dumps(several.describe()))["models"]
    assert [(model["name"], model["missing"]) for model in told] == [("a", []), ("b", ["decode"])]


def test_models_of_several_routers_are_added_up() -> None:
    routers = [
        {"recent": RECENT, "models": [model_row("a", waiting=1, missing=("decode",))]},
        {"recent": RECENT, "models": [model_row("a", waiting=2), model_row("b")]},
    ]
    first, second = sum_of_routers(routers)["models"]
    assert (first["num_requests_waiting"], first["num_requests_in_flight"]) == (3, 4)
    assert first["missing"] == ["decode"]
    assert second == model_row("b")


def tier_row(name: str, *, waiting: int = 0, met: int = 0, missed: int = 0) -> dict[str, object]:
    return {
        "name": name,
        "num_requests_waiting": waiting,
        "num_requests_running": 2,
        "targets": {"ttft": {"met": met, "missed": missed}, "tpot": {"met": 0, "missed": 0}},
    }


def test_tiers_are_shown_where_there_are_any() -> None:
    view = some_view()
    assert "tier" not in text_of(view)
    assert "tiers" not in view.describe()
    tiers = [tier_row("max", met=3, missed=1), tier_row("base", waiting=5)]
    view = dataclasses.replace(view, router={**view.router, "tiers": tiers})
    rows = {line.split()[0]: line.split() for line in text_of(view).splitlines()[2:] if line}
    assert rows["tier"] == ["tier", "running", "queue", "TTFT", "met", "TPOT", "met"]
    assert rows["max"] == ["max", "2", "0", "75%", "-"]
    assert rows["base"] == ["base", "2", "5", "-", "-"]
    assert json.loads(json.dumps(view.describe()))["tiers"] == tiers


def test_tiers_of_several_routers_are_added_up() -> None:
    routers = [
        {"recent": RECENT, "tiers": [tier_row("max", waiting=1, met=2), tier_row("base")]},
        {"recent": RECENT, "tiers": [tier_row("max", waiting=2, met=1, missed=3)]},
    ]
    best, base = sum_of_routers(routers)["tiers"]
    assert (best["name"], best["num_requests_waiting"], best["num_requests_running"]) == (
        "max",
        3,
        4,
    )
    assert best["targets"]["ttft"] == {"met": 3, "missed": 3}
    assert base == tier_row("base")


def test_metrics_are_on_the_port_of_http() -> None:
    assert metrics_url("https://h:1/v1") == "https://h:1/metrics"


def test_memory_is_that_of_a_process_and_its_children() -> None:
    code = "import subprocess, sys; child = subprocess.Popen(['sleep', '600'])\n"
    code += "print('both run', flush=True); sys.stdin.read(); child.kill()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"both run\n"
        found = memory_of_trees([parent.pid, 2**30])
        parent.stdin.close()
    assert found.keys() == {parent.pid}
    assert found[parent.pid] > 10**6


@contextmanager
def router_of_many(folder: Path, num_workers: int) -> Iterator[RunDir]:
    """A real router with so many registered ranks, in a run directory; each has a process."""
    cluster = ClusterSection(name="many", run_dir=str(folder), secret="sesame")
    ports = RouterSection(port=0, control_port=0)
    config = resolve_config(ClusterConfig(cluster=cluster, router=ports))
    run_dir = RunDir(folder / "many")
    run_dir.create()
    run_dir.config_path.write_text(dump_config(config), encoding="utf-8")
    run_dir.write_secret("sesame")
    command = [sys.executable, "-m", "router", "--config", str(run_dir.config_path)]
    environment = {"TANDEM_SECRET": "sesame", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        log = stack.enter_context((folder / "router.log").open("wb"))
        router = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log)
        stack.enter_context(router)
        stack.callback(router.kill)
        states = [process("router", Role.ROUTER)]
        for index in range(num_workers):
            sleeper = stack.enter_context(subprocess.Popen(["sleep", "600"]))
            stack.callback(sleeper.kill)
            role = Role.PREFILL if index % 2 else Role.DECODE
            one = process(f"{role.value}-{index}", role)
            states.append(ProcessState(**{**_fields(one), "pid": sleeper.pid}))
        run_dir.write_state(
            state_of(
                states,
                name="many",
                endpoint=config.endpoint,
                control_address=f"127.0.0.1:{config.router.control_port}",
            )
        )
        stack.enter_context(run_dir.locked())
        yield run_dir


def _fields(state: ProcessState) -> dict[str, object]:
    import dataclasses

    return {item.name: getattr(state, item.name) for item in dataclasses.fields(state)}


def cpu_of_children_s() -> float:
    """Of those that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def load() -> registry_pb2.WorkerLoad:
    return registry_pb2.WorkerLoad(num_requests_running=2, num_free_blocks=75, num_total_blocks=100)


@pytest.mark.slow
async def test_a_hundred_workers_are_shown_within_a_second(tmp_path: Path) -> None:
    """What is bounded, with room, is the work: a machine that is busy takes longer for it."""
    with router_of_many(tmp_path, 100) as run_dir:
        state = run_dir.read_state()
        assert state is not None
        clients = []
        for index, one in enumerate(state.processes[1:]):
            record = registry_pb2.WorkerRecord(
                identity=common_pb2.WorkerIdentity(instance=one.instance, epoch=index + 1, rank=0),
                role=common_pb2.ROLE_PREFILL if index % 2 else common_pb2.ROLE_DECODE,
                address=f"127.0.0.1:{index + 1}",
                metrics_address=f"127.0.0.1:{index + 1001}",
                model="tandem-python",
                num_ranks=1,
                max_model_len=512,
                block_size=16,
            )
            credentials = Credentials(secret="sesame")
            clients.append(RegistryClient(state.control_address, credentials, record, load))
        try:
            await asyncio.gather(*(client.start() for client in clients))
            began, cpu_s = time.monotonic(), cpu_of_children_s()
            status = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "deploy", "status", "--json", "--name", "many"),
                *("--config", str(run_dir.config_path)),
                cwd=ROOT,
                stdout=subprocess.PIPE,
            )
            output, _ = await status.communicate()
            seconds, cpu_s = time.monotonic() - began, cpu_of_children_s() - cpu_s
        finally:
            await asyncio.gather(*(client.close() for client in clients))
    found = json.loads(output)
    assert status.returncode == 0
    assert len(found["processes"]) == 101
    assert found["roles"]["decode"]["num_ready"] == 50
    assert found["roles"]["decode"]["num_running"] == 100
    assert found["roles"]["prefill"]["kv_used"] == 0.25
    assert found["processes"][1]["metrics_address"] == "127.0.0.1:1001"
    assert all(entry["memory_bytes"] for entry in found["processes"][1:])
    print(f"status of 100 workers took {seconds:.2f} s, {cpu_s:.2f} s of a core")
    assert cpu_s < 6
