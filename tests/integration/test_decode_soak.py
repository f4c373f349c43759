"""Decode under random load for minutes, its steps overlapped: bursts, lulls, cancels, preemption.

Two ranks share experts. On one of the two kinds of ranks a step is really behind its host, as on a
GPU (`lagging_decode`). Whatever happens to a request and around it, its tokens and text are those
of an undisturbed run; each is answered; and at the end nothing is held that was not held before.

`make soak` runs it for ten minutes, `TANDEM_SOAK_SECONDS` sets another time; a run of seconds
belongs to `make test`.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.generate import generate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.sampling.graph_sampler import MAX_EDITS
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
)
from runtime.sampling import SamplingParams
from tests.integration.client import Completion, stream
from tests.integration.cluster import NO_DRAFTS, Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.lagging_decode import BROKEN
from tests.integration.test_faults import num_migrations
from tests.integration.test_soak import num_open_files
from tests.waiting import wait_until

FIXED, LAGGING = "tests.integration.fixed_decode", "tests.integration.lagging_decode"
SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "600"))
NUM_CASES = 64
MAX_MODEL_LEN = 320
BLOCK_SIZE = 16
CONCURRENCY = 20
CANCEL_SHARE = 0.15
MOST_MORE_FILES = 12
MOST_MORE_THREADS = 6
MOST_MORE_MIB = 48.0
# Each counts something that is taken and given back, on the ranks of decode.
HELD = (
    "pd_decode_quarantined_blocks",
    "pd_decode_offloaded_blocks",
    "pd_kv_transfer_metadata_slots_in_use",
    "pd_decode_num_requests",
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0, "presence_penalty": 1.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.5},
)


def decode_soak_config() -> ClusterConfig:
    """Two ranks of 16 small blocks each: a few requests fit, and their growth does not."""
    return ClusterConfig(
        # Fixed shapes cost a CPU as much as the longest context.
        model=ModelSection(path=str(MODEL_DIR), max_model_len=MAX_MODEL_LEN),
        router=RouterSection(request_timeout_s=15.0),
        prefill=PrefillSection(
            num_blocks=160, block_size=BLOCK_SIZE, max_num_batched_tokens=128, overlap_steps="on"
        ),
        decode=DecodeSection(
            dp=2,
            num_blocks=17,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            overlap_steps="on",
            preemption_host_blocks=10,
            num_speculative_tokens=NO_DRAFTS,  # these runners' steps are of a token
        ),
        kv_transfer=KVTransferSection(
            transport="loopback", layers_per_group=2, num_metadata_slots=24
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request and its undisturbed answer."""

    prompt: list[int]
    params: dict[str, Any]
    """Of the API."""
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    """None where it was not answered whole: it takes too long, or does not fit."""
    finish_reason: str = ""

    @property
    def sampling(self) -> SamplingParams:
        """The same for the engine."""
        names = ("model", "ignore_eos")
        params = {name: value for name, value in self.params.items() if name not in names}
        return SamplingParams(**{**params, "stop_token_ids": tuple(params["stop_token_ids"])})

    def body(self) -> dict[str, Any]:
        return {"model": "tandem-python", "ignore_eos": True, **self.params}


def draw_cases(draw: random.Random, count: int) -> list[Case]:
    """Random lengths, a third with one of three long beginnings."""
    shared = [[draw.randrange(300, 4000) for _ in range(64)] for _ in range(3)]
    cases = []
    for index in range(count):
        prompt = [draw.randrange(300, 4000) for _ in range(int(10 ** draw.uniform(0, 2)))]
        if draw.random() < 0.3:
            prompt = draw.choice(shared) + prompt
        params = {
            **SAMPLINGS[index % len(SAMPLINGS)],
            "seed": draw.randrange(2**32),
            "max_tokens": draw.choice(
                (1, 2, draw.randrange(3, 20), *[draw.randrange(80, 120)] * 3)
            ),
            "min_tokens": 0,
            "stop_token_ids": [],
        }
        cases.append(Case(prompt=prompt, params=params))
    return cases


def with_outputs(oracle: DeepseekV3ForCausalLM, cases: list[Case]) -> list[Case]:
    outputs = generate(oracle, [c.prompt for c in cases], [c.sampling for c in cases])
    return [
        replace(case, token_ids=output.token_ids, finish_reason=output.finish_reason.value)
        for case, output in zip(cases, outputs, strict=True)
    ]


def with_stop(draw: random.Random, case: Case) -> Case:
    """Stop at one of the tokens that the case gives, maybe not at its first occurrence."""
    # Mostly early, so that admission expects little of those that go on to their length.
    place = int(len(case.token_ids) * draw.random() ** 3)
    changes = {
        "stop_token_ids": [case.token_ids[place], 3],
        "min_tokens": draw.choice((0, place)),
    }
    return replace(case, params={**case.params, **changes})


def crowded(case: Case) -> Case:
    """The same with more stop tokens than fixed shapes have room for: the plain runner takes it."""
    stops = [token for token in range(3000, 4000) if token not in case.token_ids][: MAX_EDITS + 1]
    return replace(case, params={**case.params, "stop_token_ids": stops, "min_tokens": 1})


def make_cases(oracle: DeepseekV3ForCausalLM, count: int) -> list[Case]:
    """Cases of all kinds; those that begin with `BROKEN` lose a step's numbers once, and move."""
    draw = random.Random(29)
    plain = with_outputs(oracle, draw_cases(draw, count))
    stopped = with_outputs(
        oracle, [with_stop(draw, case) for case in plain if case.params["max_tokens"] > 2]
    )
    # Hardly in the time that a request has, and with most of a pool.
    long = [replace(case, params={**case.params, "max_tokens": 200}) for case in plain[:2]]
    plainly = with_outputs(oracle, [crowded(case) for case in plain[1:20:6]])
    broken = [replace(case, prompt=[BROKEN, *case.prompt]) for case in plain[:4]]
    broken = [replace(case, params={**case.params, "max_tokens": 20}) for case in broken]
    return [*plain[::2], *stopped, *with_outputs(oracle, [*long, *broken]), *plainly]


def with_stop_text(draw: random.Random, case: Case) -> Case:
    """End at a piece of the text, which the router finds while decode runs ahead."""
    assert case.text is not None
    start = draw.randrange(len(case.text) - 3)
    stop = case.text[start : start + 3]
    end = case.text.index(stop)
    return replace(
        case,
        params={**case.params, "stop": [stop]},
        text=case.text[:end],
        finish_reason="stop",
    )


@dataclass(slots=True)
class DecodeSoak:
    """Random requests against a cluster, and what became of them."""

    cluster: Cluster
    cases: list[Case]
    draw: random.Random
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    num_requests: int = 0

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            self.cluster.base_url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=60),
        )

    async def undisturbed(self) -> None:
        """A few at a time; fills in the texts."""
        gate = asyncio.Semaphore(4)

        async def one(session: aiohttp.ClientSession, case: Case) -> Case:
            async with gate:
                answer = await stream(session, case.prompt, **case.body())
            code = (answer.error or {"code": ""})["code"]
            if code in {"timeout", "out_of_kv_blocks"}:
                assert answer.token_ids == case.token_ids[: len(answer.token_ids)]
                return case
            assert (answer.token_ids, code) == (case.token_ids, ""), (answer, case)
            return replace(case, text=answer.text)

        async with self.session() as session:
            self.cases = list(await asyncio.gather(*(one(session, case) for case in self.cases)))
        # Before their least length requests do not stop at texts either.
        long = [
            case
            for case in self.cases
            if len(case.text or "") > 12 and not case.params["min_tokens"]
        ]
        self.cases += [with_stop_text(self.draw, case) for case in long[::4]]

    async def run(self, seconds: float) -> None:
        """Bursts of up to 20 requests, single ones, and lulls in which everything ends."""
        gate = asyncio.Semaphore(CONCURRENCY)
        end = time.monotonic() + seconds
        async with self.session() as session, asyncio.TaskGroup() as group:
            while time.monotonic() < end:
                kind = self.draw.random()
                for _ in range(self.draw.randrange(4, 20) if kind < 0.2 else 1):
                    await gate.acquire()
                    task = group.create_task(self._one(session))
                    task.add_done_callback(lambda _: gate.release())
                lull = self.draw.uniform(2.0, 6.0) if kind > 0.985 else 0.0
                await asyncio.sleep(lull or self.draw.expovariate(4.0))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        self.num_requests += 1
        case, draw = self.draw.choice(self.cases), self.draw
        leaves_at = cancel_after = None
        if draw.random() < CANCEL_SHARE:
            # At any time, be it queued, computed or on its way; or with a token in hand.
            if draw.random() < 0.6:
                leaves_at = 10 ** draw.uniform(-3, 0.5)
            else:
                cancel_after = draw.randrange(1, 30)
        try:
            async with asyncio.timeout(leaves_at):
                answer = await stream(
                    session, case.prompt, cancel_after=cancel_after, **case.body()
                )
        except TimeoutError:
            self.outcomes["left" if leaves_at else "no answer"] += 1
            return
        self._judge(answer, case)

    def _judge(self, answer: Completion, case: Case) -> None:
        """What came is the beginning of the undisturbed answer; an error is typed and ours."""
        if answer.token_ids != case.token_ids[: len(answer.token_ids)]:
            self.wrong.append(f"{answer.token_ids} instead of {case}")
        if case.text is not None and not case.text.startswith(answer.text):
            self.wrong.append(f"{answer.text!r} instead of {case}")
        if answer.error is not None:
            self._judge_error(answer, case)
        elif answer.finish_reason == "cancelled":
            self.outcomes["cancelled"] += 1
        else:
            self.outcomes["success"] += 1
            is_whole = "stop" in case.params or answer.token_ids == case.token_ids
            is_whole &= case.text is None or answer.text == case.text
            if not is_whole or answer.finish_reason != case.finish_reason:
                self.wrong.append(f"{answer} instead of {case}")

    def _judge_error(self, answer: Completion, case: Case) -> None:
        assert answer.error is not None
        code = str(answer.error["code"])
        self.outcomes[code] += 1
        is_ours = answer.error["request_id"] == answer.request_id
        if not (is_ours and code in {"timeout", "out_of_kv_blocks"}):
            self.wrong.append(f"{answer} instead of {case}")


def num_threads(cluster: Cluster) -> dict[str, int]:
    """Threads of each process."""
    return {
        name: len(os.listdir(f"/proc/{process.pid}/task"))
        for name, process in cluster.processes.items()
    }


def resident_mib(cluster: Cluster) -> dict[str, float]:
    """Resident memory of each process."""
    found = {}
    for name, process in cluster.processes.items():
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("VmRSS:"))
        found[name] = round(int(line.split()[1]) / 1024, 1)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What the processes of an idle cluster hold."""

    files: dict[str, int]
    threads: dict[str, int]
    mib: dict[str, float]
    registered: float
    held: dict[str, float]

    @classmethod
    def of(cls, cluster: Cluster) -> Holdings:
        cluster.wait_idle(60.0)
        wait_until(
            lambda: cluster.metric("decode-0", "pd_kv_transfer_metadata_slots_in_use") == 0,
            "metadata slots are free",
            10.0,
        )
        return cls(
            files=num_open_files(cluster),
            threads=num_threads(cluster),
            mib=resident_mib(cluster),
            registered=cluster.metric("decode-0", "pd_kv_transfer_registered_bytes"),
            held={name: cluster.metric("decode-0", name) for name in HELD},
        )


def growth(after: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    return {name: round(value - before[name], 1) for name, value in after.items()}


def check_holdings(after: Holdings, before: Holdings) -> None:
    assert set(after.held.values()) == {0.0}, after.held
    assert after.registered == before.registered
    assert max(growth(after.files, before.files).values()) <= MOST_MORE_FILES
    assert max(growth(after.threads, before.threads).values()) <= MOST_MORE_THREADS
    assert max(growth(after.mib, before.mib).values()) <= MOST_MORE_MIB


def check_outcomes(
    soak: DecodeSoak, counted: dict[str, float], *, seconds: float, can_break: bool
) -> None:
    assert soak.wrong == []
    assert sum(soak.outcomes.values()) == soak.num_requests
    assert soak.outcomes["no answer"] == 0
    # On a busy machine many run out of time, of seconds most; what they had by then was right.
    least = 0.3 if seconds >= 60.0 else 0.1
    assert soak.outcomes["success"] > least * soak.num_requests
    assert soak.outcomes["left"] > 0
    assert counted["pd_decode_cached_prompt_tokens_total"] > 0
    assert not can_break or counted["migrations"] > 0
    if seconds >= 60.0:  # it is rare, admission sees to that
        assert counted["pd_decode_preemptions_total"] > 0
        assert counted["pd_decode_resumes_total"] > 0


COUNTED = (
    "pd_decode_preemptions_total",
    "pd_decode_resumes_total",
    "pd_decode_cached_prompt_tokens_total",
    "pd_decode_generated_tokens_total",
    "pd_decode_step_seconds_sum",
    "pd_decode_step_seconds_count",
)


def run_decode_soak(
    folder: Path,
    cases: list[Case],
    seconds: float,
    *,
    module: str,
    report: Callable[[str], object] = print,
) -> None:
    can_break = module == LAGGING
    with Cluster(decode_soak_config(), folder, modules={"decode": module}) as cluster:
        soak = DecodeSoak(cluster, cases, random.Random(31))
        asyncio.run(soak.undisturbed())
        first = replace(soak, outcomes=collections.Counter(), num_requests=0)
        asyncio.run(first.run(min(0.2 * seconds, 20.0)))
        before = Holdings.of(cluster)
        asyncio.run(soak.run(seconds))
        after = Holdings.of(cluster)
        counted = {name: cluster.metric("decode-0", name) for name in COUNTED}
        counted["migrations"] = num_migrations(cluster)
        figures = {
            "seconds": seconds,
            "requests": soak.num_requests,
            "outcomes": dict(soak.outcomes),
            "wrong": soak.wrong[:5],
            **counted,
            "mib": after.mib,
            "more": {
                "mib": growth(after.mib, before.mib),
                "files": growth(after.files, before.files),
                "threads": growth(after.threads, before.threads),
            },
            "held": after.held,
        }
        report(f"\ndecode soak, {module.rpartition('.')[2]}: {json.dumps(figures)}\n")
        check_outcomes(soak, counted, seconds=seconds, can_break=can_break)
        check_holdings(after, before)
        unseen = [
            name for name in cluster.processes if "never retrieved" in cluster.log_tail(name, 2**30)
        ]
        assert unseen == []
    assert cluster.marked_processes() == []


@pytest.fixture(scope="module")
def few_cases(oracle: DeepseekV3ForCausalLM) -> list[Case]:
    """Of the short runs: what one process gives takes as long as what is measured."""
    return make_cases(oracle, 10)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", [LAGGING, FIXED])
def test_a_short_decode_soak(
    tmp_path: Path, few_cases: list[Case], capsys: pytest.CaptureFixture[str], module: str
) -> None:
    with capsys.disabled():
        run_decode_soak(tmp_path, few_cases, 12.0, module=module)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 600)
def test_a_long_decode_soak(
    tmp_path: Path, oracle: DeepseekV3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        run_decode_soak(tmp_path, make_cases(oracle, NUM_CASES), SECONDS, module=LAGGING)
