"""Rolling restart, scaling and a change of keys, with keys, tiers and two models on at once.

The controller and the commands are the real ones; the second model's workers are started by hand.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deploy.checks.cluster import resolve_config
from deploy.cli import main as tandem
from deploy.ports import free_port, free_ports
from runtime.config import ClusterConfig, ClusterSection, ModelSection, RouterSection
from runtime.config.file import dump_config
from runtime.config.tiers import TierSection
from runtime.process import dying_with_us
from tests.deploy.control.cluster import ControlledCluster
from tests.integration.test_drain import drain_config
from tests.integration.test_operations import ENTRYPOINTS
from tests.pods.chart import NUM_LANES, Load
from tests.pods.test_two_releases import ALIAS, SECOND, write_second
from tests.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
FIRST = "tandem-python"
TIERS = (
    TierSection(name="max", order=0, ttft_ms=60_000.0, share=0.5),
    TierSection(name="base", order=1, share=0.2, default=True),
)
REQUESTS_PER_MINUTE = 3
Answer = tuple[int, dict[str, Any]]


def add_key(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str) -> str:
    """`tandem keys add`; the key that it prints."""
    capsys.readouterr()
    assert tandem(["keys", "add", *arguments, "--file", str(file)]) == 0
    return capsys.readouterr().out.split()[0]


def config_in(folder: Path) -> ClusterConfig:
    """Two prefill and two decode instances of the first model, and the second at its router."""
    port, control_port = free_ports("127.0.0.1", 2), free_port("127.0.0.1")
    checkpoint = folder / SECOND
    checkpoint.mkdir()
    write_second(checkpoint)
    models = folder / "models.toml"
    models.write_text(f'[models.{SECOND}]\npath = "{checkpoint}"\naliases = ["{ALIAS}"]\n')
    # A router begins with a file that is there.
    keys = folder / "keys.toml"
    assert tandem(["keys", "add", "ops", "--right", "operations", "--file", str(keys)]) == 0
    base = drain_config()
    return resolve_config(
        dataclasses.replace(
            base,
            cluster=ClusterSection(name="all", run_dir=str(folder)),
            model=dataclasses.replace(base.model, name=FIRST),
            router=RouterSection(
                worker_wait_s=120.0,
                port=port,
                control_port=control_port,
                keys_file=str(keys),
                models_file=str(models),
            ),
            tiers=TIERS,
        )
    )


@dataclass(slots=True)
class Second:
    """Workers of the second model, as somebody starts them who joins the routers."""

    cluster: ControlledCluster
    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def stop(self) -> None:
        """All that still run, in order."""
        for process in self.running:
            process.send_signal(signal.SIGTERM)
        ends = [process.wait(60) for process in self.running]
        assert not any(ends), ends

    def start(self, role: str, number: int) -> subprocess.Popen[bytes]:
        """One rank."""
        context = self.cluster.context
        model = ModelSection(path=str(self.folder / SECOND), name=SECOND)
        # Drafts were decided for the first one; this one has no layer for them.
        decode = dataclasses.replace(context.config.decode, num_speculative_tokens="default")
        config = dataclasses.replace(context.config, model=model, decode=decode)
        file = self.folder / "second.toml"
        file.write_text(dump_config(config))
        name = f"second-{role}-{number}"
        command = [sys.executable, "-m", role, "--config", str(file), "--instance", name]
        command += ["--rank", "0", "--rendezvous", f"127.0.0.1:{free_port('127.0.0.1')}"]
        command += ["--router", context.control_address, "--grace", "2"]
        environment = {
            **os.environ,
            "TANDEM_SECRET": context.credentials.secret,
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                dying_with_us(command), env=environment, stdout=log, stderr=log
            )
        self.running.append(process)
        return process


@dataclass(slots=True)
class Client:
    """Requests with one key."""

    url: str
    key: str

    async def get(self, path: str) -> Answer:
        async with self._session() as http, http.get(path) as response:
            return response.status, await response.json()

    async def ask(self, **change: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        body = {"model": FIRST, "prompt": "x", "max_tokens": 1, "temperature": 0, **change}
        async with self._session() as http, http.post("/v1/completions", json=body) as response:
            return response.status, await response.json(), dict(response.headers)

    def _session(self) -> aiohttp.ClientSession:
        headers = {"authorization": f"Bearer {self.key}"}
        return aiohttp.ClientSession(self.url, headers=headers)


@dataclass(slots=True)
class Quota:
    """A key of few requests a minute, of which as many are asked as are let in."""

    client: Client
    began: float = 0.0
    num_allowed: int = 0

    async def spend(self) -> None:
        """Until it is refused; never more than its bucket and what has come since are let in."""
        self.began = self.began or time.monotonic()
        for _ in range(REQUESTS_PER_MINUTE + 2):
            status, _, headers = await self.client.ask()
            elapsed_s = time.monotonic() - self.began
            if status == 429:
                assert int(headers["Retry-After"]) > 0
                break
            assert status == 200
            self.num_allowed += 1
            most = REQUESTS_PER_MINUTE * (1 + elapsed_s / 60)
            assert self.num_allowed <= most + 1e-6, (self.num_allowed, elapsed_s)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ControlledCluster]:
    cluster = ControlledCluster(
        config_in(tmp_path), tmp_path, entrypoints=ENTRYPOINTS, start_s=280.0
    )
    with cluster.running():
        yield cluster


def status_of(cluster: ControlledCluster, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `tandem status --json` prints; the cluster has to be ready."""
    capsys.readouterr()
    assert tandem(["status", "--json", "--config", cluster.config_file]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def check_status(told: dict[str, Any], *, decode: int, second_decode: int) -> None:
    """Roles are of what this cluster started; models have all workers of theirs."""
    ready = {role: (of["num_ready"], of["num_instances"]) for role, of in told["roles"].items()}
    assert ready == {"router": (1, 1), "prefill": (2, 2), "decode": (decode, decode)}
    assert [tier["name"] for tier in told["tiers"]] == ["max", "base"]
    models = {model["name"]: model for model in told["models"]}
    assert list(models) == [FIRST, SECOND]
    assert [model["missing"] for model in models.values()] == [[], []]
    assert models[FIRST]["num_prefill"] == 2
    assert models[FIRST]["num_decode"] == decode
    assert models[SECOND]["num_decode"] == second_decode


async def until_served(client: Client, status: int) -> None:
    """Until the router has read the file that lets this key in, or no longer does."""
    async with asyncio.timeout(120):
        while (await client.get("/v1/models"))[0] != status:
            await asyncio.sleep(0.1)


async def operate(
    cluster: ControlledCluster, second: Second, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = cluster.context.endpoint.removesuffix("/v1")
    drawn = {name: add_key(capsys, keys, name, *more) for name, more in WHO.items()}
    of = {name: Client(url, key) for name, key in drawn.items()}
    for role in ("prefill", "decode"):
        second.start(role, 0)

    async def command(*words: str) -> None:
        assert await asyncio.to_thread(tandem, [*words, "--config", cluster.config_file]) == 0

    def second_ready() -> bool:
        return asyncio.run(of["ann"].get(f"/ready?model={SECOND}"))[0] == 200

    await until_served(of["quota"], 200)  # the last key that was added is known
    await asyncio.to_thread(wait_until, second_ready, "the second model is ready", 280)
    loads = [Load(url, FIRST, drawn["ann"]), Load(url, SECOND, drawn["bob"])]
    quota = Quota(of["quota"])

    async def some_more() -> None:
        for load in loads:
            await load.some_more(NUM_LANES)

    async with loads[0].under_way(), loads[1].under_way():
        await some_more()
        await quota.spend()
        assert quota.num_allowed >= REQUESTS_PER_MINUTE
        await command("restart", "--rolling", "--deadline", "1")
        await some_more()
        await quota.spend()

        # One key goes and another one comes; those who stay notice nothing.
        assert tandem(["keys", "remove", "gone", "--file", str(keys)]) == 0
        late = Client(url, add_key(capsys, keys, "late"))
        await until_served(of["gone"], 401)
        await until_served(late, 200)
        await quota.spend()

        await command("scale", "decode", "3")
        other = second.start("decode", 1)
        told = await asyncio.to_thread(status_of, cluster, capsys)
        async with asyncio.timeout(200):
            while told["models"][1]["num_decode"] < 2:
                await asyncio.sleep(0.5)
                told = await asyncio.to_thread(status_of, cluster, capsys)
        check_status(told, decode=3, second_decode=2)
        await some_more()
        await command("scale", "decode", "1", "--deadline", "1")
        other.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(other.wait, 60) == 0
        await some_more()
        check_status(await asyncio.to_thread(status_of, cluster, capsys), decode=1, second_decode=1)
        await quota.spend()
    assert [load.failed for load in loads] == [[], []]
    await check_rights(of)


async def check_rights(of: dict[str, Client]) -> None:
    """Models and tiers are still those of each key."""
    listed = {name: (await of[name].get("/v1/models"))[1]["data"] for name in ("ann", "bob")}
    assert [card["id"] for card in listed["ann"]] == [FIRST, SECOND, ALIAS]
    assert [card["id"] for card in listed["bob"]] == [SECOND, ALIAS]
    assert (await of["bob"].ask())[0] == 403, "the first model is none of his"
    assert (await of["bob"].ask(model=ALIAS, service_tier="max"))[0] == 403
    status, answer, _ = await of["ann"].ask()
    assert (status, answer["service_tier"]) == (200, "max")


WHO = {
    "ann": ("--tier", "max", "--tier", "base"),
    "bob": ("--model", SECOND),
    "gone": (),
    "quota": ("--rpm", str(REQUESTS_PER_MINUTE)),
}


def test_no_stream_notices_operations_while_keys_tiers_and_models_hold(
    tmp_path: Path, cluster: ControlledCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    second = Second(cluster, tmp_path)
    try:
        asyncio.run(operate(cluster, second, tmp_path / "keys.toml", capsys))
    finally:
        second.stop()
