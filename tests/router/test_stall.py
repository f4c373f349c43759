"""A router that stands still for longer than a lease loses nobody: the real process, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from deploy.ports import free_port
from router.text.tokenizer import Tokenizer
from runtime.config import ClusterConfig, ModelSection, RouterSection
from runtime.config.file import SECRET_VARIABLE, dump_config
from tests.router.conftest import ANSWER, MODEL
from tests.router.fakes import SECRET, FakeDecode, FakePrefill

LEASE_TTL_S = 4.0
NUM_REQUESTS = 8


@dataclass
class Router:
    process: asyncio.subprocess.Process
    url: str
    control: str
    log: Path


@pytest.fixture
async def router(model_dir: Path, tmp_path: Path) -> AsyncIterator[Router]:
    port, control = free_port("127.0.0.1"), free_port("127.0.0.1")
    config = ClusterConfig(
        model=ModelSection(path=str(model_dir), name=MODEL),
        router=RouterSection(port=port, control_port=control, lease_ttl_s=LEASE_TTL_S),
    )
    file, log = tmp_path / "cluster.toml", tmp_path / "log"
    file.write_text(dump_config(config), encoding="utf-8")
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "--config", str(file)),
            env={**os.environ, SECRET_VARIABLE: SECRET},
            stderr=output,
        )
    yield Router(process, f"http://127.0.0.1:{port}", f"127.0.0.1:{control}", log)
    process.send_signal(signal.SIGCONT)
    process.kill()
    await process.wait()


async def until_ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            async with http.get("/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_router_that_was_stopped_cuts_nothing(router: Router, tokenizer: Tokenizer) -> None:
    def script(_: object) -> list[int]:
        eos = tokenizer.token_id("<eos>")
        assert eos is not None
        return [*tokenizer.encode(ANSWER, add_special_tokens=False), eos]

    prefill, decode = FakePrefill("prefill-0", MODEL, script), FakeDecode("decode-0", MODEL, script)
    prefill.run_s = 2.5 * LEASE_TTL_S
    await prefill.start(router.control)
    await decode.start(router.control)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 100}

    async def ask(http: aiohttp.ClientSession) -> str:
        async with http.post("/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer["choices"][0]["text"]

    async with aiohttp.ClientSession(router.url) as http:
        await until_ready(http)
        asked = [asyncio.create_task(ask(http)) for _ in range(NUM_REQUESTS)]
        async with asyncio.timeout(60):
            while len(prefill.seen) < NUM_REQUESTS:
                await asyncio.sleep(0.02)
        router.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5 * LEASE_TTL_S)
        router.process.send_signal(signal.SIGCONT)
        assert await asyncio.gather(*asked) == [ANSWER] * NUM_REQUESTS
    assert len(prefill.seen) == NUM_REQUESTS  # nothing was tried again
    said = router.log.read_text()
    assert "ran out" not in said
    assert "stood still" in said
    for worker in (prefill, decode):
        await worker.close()
