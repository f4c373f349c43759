"""One cell after the other, on one cluster that is whole again before each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from deploy.checks.cluster import resolve_config
from deploy.cli import main as tandem
from deploy.control.events import interrupted
from deploy.plan import Role
from deploy.state import Phase
from router.keys.file import add_to_file
from router.keys.record import KeyRecord, Right, hash_key, new_key
from runtime.config import (
    ClusterConfig,
    ClusterSection,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
    TierSection,
)
from runtime.config.file import load_config
from tests.deploy.control.cluster import ControlledCluster
from tests.integration.conftest import MODEL_DIR
from tests.matrix.asks import Ask, answer_to, make_ask
from tests.matrix.cells import OPERATIONS, Cell, Fault, Feature, Moment
from tests.matrix.faults import INJECTIONS, LETHAL
from tests.matrix.history import Answer, problems
from tests.matrix.stage import Stage, Standing
from tests.waiting import until

WAIT_S = 300.0
NUM_COMPANIONS = 3
NUM_PLACES = 5
"""One router, two instances of each role: none is started beside another."""
AFTER = {Moment.TRANSFER: 2, Moment.MID_STREAM: 5}
"""Steps and posts that go by first; where nothing stands, the first one is it."""
ENTRYPOINTS = {
    Role.ROUTER: (sys.executable, "-m", "router"),
    Role.PREFILL: (sys.executable, "-m", "tests.matrix.moments", "prefill"),
    Role.DECODE: (sys.executable, "-m", "tests.matrix.moments", "decode"),
}


def config_in(folder: Path, keys_file: Path) -> ClusterConfig:
    """Two prefill instances and two groups of two decode ranks, which draft and move experts."""
    return resolve_config(
        ClusterConfig(
            cluster=ClusterSection(name="matrix", run_dir=str(folder)),
            model=ModelSection(path=str(MODEL_DIR), max_model_len=1024),
            router=RouterSection(
                **{"port": 0, "control_port": 0, "keys_file": str(keys_file)},
                **{"lease_ttl_s": 3.0, "worker_wait_s": WAIT_S, "max_migrations": 20},
            ),
            prefill=PrefillSection(instances=2, num_blocks=128, max_num_batched_tokens=64),
            decode=DecodeSection(
                **{"instances": 2, "dp": 2, "num_blocks": 128, "num_redundant_experts": 2},
                **{"num_speculative_tokens": 1, "step_timeout_s": 20.0},
                **{"rebalance_experts": "on", "rebalance_objective": "rows"},
                **{"rebalance_interval_steps": 8, "rebalance_min_gain": 0.0},
            ),
            kv_transfer=KVTransferSection(transport="loopback", layers_per_group=1),
            tiers=(
                TierSection(name="max", ttft_ms=1000.0, open=True),
                TierSection(name="base", order=1),
            ),
        )
    )


def make_keys(path: Path) -> dict[str, str]:
    """A key for each of two tenants; that of the unnamed one may see the cluster's state."""
    keys = {"": new_key(), "other": new_key()}
    for name, key in keys.items():
        rights = frozenset({Right.INFERENCE} if name else {Right.INFERENCE, Right.OPERATIONS})
        add_to_file(path, KeyRecord(name=name or "first", sha256=hash_key(key), rights=rights))
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a cell."""

    number: int
    seed: int
    cell: str
    victim: str
    seconds: float
    num_answers: int
    problems: tuple[str, ...]
    is_whole: bool
    """Whether the cluster serves and holds nothing when all is over."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))


class Experiment:
    """Carries cells out; `folder` is on the disk that may be filled."""

    def __init__(
        self, cluster: ControlledCluster, stage: Stage, folder: Path, keys: dict[str, str]
    ) -> None:
        self._cluster = cluster
        self._stage = stage
        self._folder = folder
        self._keys = keys
        self._url = cluster.context.endpoint.removesuffix("/v1")

    async def run(self, number: int, seed: int, cell: Cell) -> Report:
        """One cell; the cluster is whole before it, or the problem is told."""
        began, since = time.monotonic(), time.time()
        draw = random.Random(f"{seed} {number}")
        others = [feature for feature in Feature if feature is not cell.feature]
        asks = [make_ask(x, draw) for x in (cell.feature, *draw.sample(others, NUM_COMPANIONS))]
        trial = _Trial(self, cell, asks)
        found: list[str] = []
        try:
            await self.until_whole()
            async with self._session() as session:
                await trial.run(session)
        except (AssertionError, TimeoutError, aiohttp.ClientError) as error:
            found.append(f"{type(error).__name__}: {error}")
        finally:
            self._stage.disarm()
        found += trial.problems()
        is_whole = True
        try:
            await self._restore(cell, trial)
            await self.until_whole()
        except AssertionError as error:
            is_whole = False
            found.append(f"not whole afterwards: {error}: {self.lacks()}")
        events = [event for event in self._cluster.events() if event.time >= since]
        left = [event.text for event in interrupted(events)]
        if left and cell.fault is not Fault.FULL_DISK:  # the line is written with the next one
            found.append(f"half done: {left}")
        return Report(
            number=number,
            seed=seed,
            cell=str(cell),
            victim=trial.victim,
            seconds=round(time.monotonic() - began, 1),
            num_answers=len(trial.answers),
            problems=tuple(found),
            is_whole=is_whole,
        )

    async def ask(self, session: aiohttp.ClientSession, ask: Ask) -> Answer:
        """What a request is answered."""
        return await answer_to(session, ask, self._keys[ask.tenant])

    async def until_whole(self) -> None:
        """Wait until all instances serve and hold nothing."""
        await until(lambda: not self.lacks(), "the cluster is whole", WAIT_S)

    def lacks(self) -> list[str]:
        """What keeps the cluster from being whole, one line each."""
        processes = self._cluster.processes.values()
        lines = [f"{one.name} is {one.phase}" for one in processes if one.phase is not Phase.READY]
        sizes = Counter({one.instance: 1 for one in processes if one.rank == 0})
        if len(sizes) != NUM_PLACES:
            lines.append(f"instances: {sorted(sizes)}")
        return lines or self._held()

    def name_of(self, pid: int) -> str:
        """Of a process of the cluster."""
        names = [one.name for one in self._cluster.processes.values() if one.pid == pid]
        return names[0] if names else ""

    def busiest(self) -> str:
        """The decode instance with most requests."""
        held: Counter[str] = Counter(dict.fromkeys(self._cluster.names("decode"), 0))
        for worker in self._status()["workers"]:
            if worker["role"] == "decode":
                held[worker["instance"]] += worker["load"]["num_requests_running"]
        return held.most_common(1)[0][0]

    def command(self, *words: str) -> int:
        """One of `tandem`."""
        chosen = () if words[0] == "apply" else ("--config", self._cluster.config_file)
        with contextlib.redirect_stdout(sys.stderr):
            return tandem([*words, *chosen])

    def changed_config(self) -> str:
        """A file with a setting changed that decode reads."""
        config = load_config(self._cluster.context.config_path)
        other_s = 21.0 if config.decode.step_timeout_s == 20.0 else 20.0
        decode = dataclasses.replace(config.decode, step_timeout_s=other_s)
        return self._cluster.write(dataclasses.replace(config, decode=decode))

    @property
    def stage(self) -> Stage:
        """Where processes stand."""
        return self._stage

    @property
    def folder(self) -> Path:
        """On the disk that may be filled."""
        return self._folder

    async def _restore(self, cell: Cell, trial: _Trial) -> None:
        """Undo what was asked for on purpose."""
        settled = (Phase.READY, Phase.DRAINED, Phase.STOPPED)
        await until(
            lambda: all(one.phase in settled for one in self._cluster.processes.values()),
            "all have settled",
            WAIT_S,
        )
        words = {Moment.DRAIN: ("restart", trial.target), Moment.SCALE: ("scale", "decode", "2")}
        if cell.moment in words and trial.target:
            status = await asyncio.to_thread(self.command, *words[cell.moment])
            assert status == 0, words[cell.moment]

    def _held(self) -> list[str]:
        try:
            status = self._status()
        except OSError as error:
            return [f"the router does not answer: {error}"]
        lines = []
        if status["num_requests_in_flight"]:
            lines.append(f"router: {status['num_requests_in_flight']} in flight")
        names = ("num_requests_running", "num_requests_waiting", "num_quarantined_blocks")
        for worker in status["workers"]:
            load = worker["load"]
            held = {name: load[name] for name in names if load[name]}
            if load["num_total_blocks"] != load["num_free_blocks"]:
                held["blocks"] = load["num_total_blocks"] - load["num_free_blocks"]
            if held or worker["state"] != "ready":
                lines.append(f"{worker['instance']}/{worker['rank']} {worker['state']}: {held}")
        return lines

    def _status(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self._keys['']}"}
        request = urllib.request.Request(f"{self._url}/status", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            status: dict[str, Any] = json.load(response)
            return status

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=2 * WAIT_S)
        return aiohttp.ClientSession(self._url, connector=connector, timeout=timeout)


class _Trial:
    """The middle of a cell: requests, and what happens to them."""

    def __init__(self, experiment: Experiment, cell: Cell, asks: list[Ask]) -> None:
        self.answers: list[tuple[Ask, Answer, Answer]] = []
        """With the undisturbed one."""
        self.victim = ""
        self.target = ""
        """The instance that the operation is for."""
        self._experiment = experiment
        self._cell = cell
        self._asks = asks
        self._expected: list[Answer] = []
        self._over = asyncio.Event()

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Undisturbed, then disturbed; returns when all is answered."""
        asked = (self._experiment.ask(session, ask) for ask in self._asks)
        self._expected = list(await asyncio.gather(*asked))
        for ask, answer in zip(self._asks, self._expected, strict=True):
            assert answer.is_whole, f"undisturbed {ask.feature}: {answer.error}"
        is_operation = self._cell.moment in OPERATIONS
        disturb = self._operate if is_operation else self._disturb
        await disturb(lambda place: self._ask(session, place, repeatedly=is_operation))

    def problems(self) -> list[str]:
        """Of all answers."""
        return [
            f"{ask.feature}: {problem}"
            for ask, actual, expected in self.answers
            for problem in problems(actual, expected)
        ]

    async def _ask(self, session: aiohttp.ClientSession, place: int, *, repeatedly: bool) -> None:
        while True:
            answer = await self._experiment.ask(session, self._asks[place])
            self.answers.append((self._asks[place], answer, self._expected[place]))
            if not repeatedly or self._over.is_set() or answer.error is not None:
                return

    async def _disturb(self, ask: Callable[[int], Awaitable[None]]) -> None:
        """The subject's process stands at the moment; the others come just before the fault."""
        stage, moment = self._experiment.stage, self._cell.moment
        migrates = self._cell.feature is Feature.MIGRATION
        first = Moment.MID_STREAM if migrates else moment
        stage.arm(first, AFTER.get(first, 1))
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(0))
            standing = await self._wait(first)
            if migrates:
                stage.arm(moment, AFTER.get(moment, 1))
                INJECTIONS[Fault.KILL].apply(standing.pid, self._experiment.folder)
                standing.release()
                standing = await self._wait(moment)
            for place in range(1, len(self._asks)):
                group.create_task(ask(place))
            await self._inject(standing)
        await self._lift(standing)

    async def _operate(self, ask: Callable[[int], Awaitable[None]]) -> None:
        """Requests go on and on while the operation runs; who has to drain stands."""
        experiment = self._experiment
        experiment.stage.arm(Moment.DRAIN)
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(len(self._asks)):
                    group.create_task(ask(place))
                await until(lambda: experiment.busiest(), "requests run")
                self.target = await asyncio.to_thread(experiment.busiest)
                operation = asyncio.create_task(
                    asyncio.to_thread(experiment.command, *self._words())
                )
                standing = await self._wait(Moment.DRAIN)
                await self._inject(standing)
                ended, _ = await asyncio.wait({operation}, timeout=WAIT_S)
                self._over.set()
                assert ended, f"the operation did not end within {WAIT_S:g} s"
        finally:
            self._over.set()
        await self._lift(standing)

    def _words(self) -> tuple[str, ...]:
        at_once = ("--deadline", "0")
        match self._cell.moment:
            case Moment.DRAIN:
                return ("drain", self.target, *at_once)
            case Moment.SCALE:
                return ("scale", "decode", "1", *at_once)
            case Moment.ROLLING_RESTART:
                return ("restart", "decode", "--rolling", *at_once)
        return ("apply", self._experiment.changed_config(), *at_once)

    async def _wait(self, moment: Moment) -> Standing:
        standing = await asyncio.to_thread(self._experiment.stage.wait, WAIT_S)
        assert standing is not None, f"nobody came to the moment {moment}"
        self.victim = self._experiment.name_of(standing.pid)
        return standing

    async def _inject(self, standing: Standing) -> None:
        injection = INJECTIONS[self._cell.fault]
        await asyncio.to_thread(injection.apply, standing.pid, self._experiment.folder)
        standing.release(injection.word)

    async def _lift(self, standing: Standing) -> None:
        await asyncio.to_thread(
            INJECTIONS[self._cell.fault].lift, standing.pid, self._experiment.folder
        )
        if self._cell.fault in LETHAL:
            with contextlib.suppress(ProcessLookupError):
                await until(lambda: not _is_alive(standing.pid), "the victim is gone", WAIT_S)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
