"""The ranks of one host: what is told of them, and that they end together."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from deploy.certificates import make_certificates
from deploy.hosts import ranks as host_ranks
from deploy.hosts.health import HostHealth
from deploy.hosts.plan import RankPlan
from deploy.hosts.ranks import HostRanks
from deploy.plan import ProcessSpec
from deploy.ports import free_port
from runtime.errors import ConfigError
from runtime.net.credentials import Credentials, Listen

HOST = "127.0.0.1"
CREDENTIALS = Credentials.of_secret("s")


@dataclass(slots=True)
class Running:
    """Two ranks, and what may be done to them."""

    folder: Path
    ports: tuple[int, int]
    url: str
    stop: asyncio.Event
    hurry: asyncio.Event
    ended: asyncio.Task[int]

    async def ask(self, path: str) -> tuple[int, dict[str, object]]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as response:
            return response.status, (await response.json())["ranks"]

    async def until(self, path: str, status: int) -> dict[str, object]:
        async with asyncio.timeout(60):
            while True:
                answer, ranks = await self.ask(path)
                if answer == status:
                    return ranks
                await asyncio.sleep(0.05)

    async def up(self) -> None:
        async with asyncio.timeout(60):
            while not all((self.folder / f"up-{port}").exists() for port in self.ports):
                await asyncio.sleep(0.05)

    def say(self, name: str) -> None:
        (self.folder / name).touch()

    async def status(self) -> int:
        return await asyncio.wait_for(self.ended, 60)


def plan_of(rank: int, port: int, folder: Path) -> RankPlan:
    command = (sys.executable, "-m", "tests.deploy.fake_rank", str(port), str(folder))
    spec = ProcessSpec(name=f"decode-0/{rank}", command=command, env={}, log_path="")
    return RankPlan(rank=rank, spec=spec, metrics_address=f"{HOST}:{port}")


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    grace_s: float = 30.0,
    credentials: Credentials = CREDENTIALS,
    server_name: str = HOST,
) -> AsyncIterator[Running]:
    ports = (free_port(HOST), free_port(HOST))
    plans = [plan_of(rank, port, folder) for rank, port in enumerate(ports)]
    ranks = HostRanks(plans, credentials, server_name, grace_s)
    listen = Listen(bind=HOST, port=free_port(HOST))
    server = HostHealth(ranks)
    await server.start(listen)
    stop, hurry = asyncio.Event(), asyncio.Event()
    ended = asyncio.create_task(ranks.run(stop, hurry))
    try:
        url = f"http://{listen.address(listen.port)}"
        yield Running(folder, ports, url, stop, hurry, ended)
    finally:
        hurry.set()
        stop.set()
        await ended
        await server.stop()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_ranks, "PROBE_S", 0.05)
    monkeypatch.setattr(host_ranks, "POLL_S", 0.02)


async def test_a_host_is_ready_when_all_its_ranks_are(tmp_path: Path) -> None:
    async with running(tmp_path) as ranks:
        await ranks.up()
        assert (await ranks.ask("/ready"))[0] == 503
        assert (await ranks.until("/health", 200)) == {"decode-0/0": "ok", "decode-0/1": "ok"}
        ranks.say("ready")
        assert await ranks.until("/ready", 200) == {"decode-0/0": True, "decode-0/1": True}


async def test_a_sick_rank_makes_the_host_sick(tmp_path: Path) -> None:
    async with running(tmp_path) as ranks:
        ranks.say("ready")
        await ranks.until("/ready", 200)
        ranks.say("sick")
        problems = await ranks.until("/health", 503)
        assert problems["decode-0/0"] == "the engine loop has ended"
        assert (await ranks.ask("/ready"))[0] == 503


async def test_a_rank_that_stopped_answering_makes_the_host_sick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as ranks:
        ranks.say("ready")
        await ranks.until("/ready", 200)
        monkeypatch.setattr(host_ranks, "SILENT_S", -1.0)  # longer ago than that, always
        problems = await ranks.until("/health", 503)
        assert "has not answered for" in str(problems["decode-0/1"])


async def test_a_rank_shows_the_certificate_of_the_name_that_others_call(tmp_path: Path) -> None:
    """It is asked at 127.0.0.1, for which nobody has a certificate."""
    files = make_certificates(tmp_path, ("decode-0.workers",))
    credentials = Credentials(secret="s", tls=files)
    async with running(tmp_path, credentials=credentials, server_name="decode-0.workers") as ranks:
        ranks.say("ready")
        await ranks.until("/ready", 200)


async def test_one_dead_rank_ends_the_others_and_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as ranks:
        await ranks.up()
        ranks.say(f"end-{ranks.ports[1]}-3")
        assert await ranks.status() == 1
    assert "decode-0/1 ended with status 3: the instance ends" in caplog.text


async def test_told_to_stop_all_ranks_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path) as ranks:
        await ranks.up()
        ranks.stop.set()
        assert await ranks.status() == 0


async def test_a_rank_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_ranks, "END_S", 0.2)
    async with running(tmp_path, grace_s=0.0) as ranks:
        await ranks.up()
        ranks.say("stubborn")
        ranks.stop.set()
        assert await ranks.status() == 1
    assert "killing decode-0/0, decode-0/1: they did not end in time" in caplog.text


async def test_where_one_left_in_order_the_others_may_follow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another host's rank was told to stop: all of the instance leave, and it was no failure."""
    caplog.set_level("INFO")
    async with running(tmp_path) as ranks:
        await ranks.up()
        ranks.say(f"end-{ranks.ports[0]}-0")
        async with asyncio.timeout(60):
            while "decode-0/0 left in order" not in caplog.text:
                await asyncio.sleep(0.02)
        assert not ranks.ended.done()
        ranks.say(f"end-{ranks.ports[1]}-0")
        assert await ranks.status() == 0


async def test_a_hurry_ends_all_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as ranks:
        await ranks.up()
        ranks.say("stubborn")
        ranks.stop.set()
        ranks.hurry.set()
        assert await ranks.status() == 1


async def test_a_taken_health_port_is_named(tmp_path: Path) -> None:
    async with running(tmp_path) as ranks:
        port = int(ranks.url.rpartition(":")[2])
        second = HostHealth(HostRanks([], CREDENTIALS, HOST, 1.0))
        with pytest.raises(ConfigError, match="--health-port"):
            await second.start(Listen(bind=HOST, port=port))
        await second.stop()
