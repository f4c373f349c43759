"""Health, status, metrics; the router as processes of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.http.server import bind_http, port_of
from router.keys.file import add_to_file
from router.keys.record import KeyLimits, KeyRecord, Right, hash_key, new_key
from runtime.config import ClusterConfig, ModelSection, RouterSection
from runtime.config.file import dump_config
from runtime.errors import ConfigError
from tests.router.conftest import MODEL, Cluster
from tests.router.fakes import SECRET, FakeDecode, FakePrefill

PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}


async def metric_values(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics", headers={"Accept": PROMETHEUS_2}) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


async def test_metrics_count_what_happened(http, cluster: Cluster) -> None:
    for stream in (False, True):
        async with http.post("/v1/completions", json={**BODY, "stream": stream}) as response:
            await response.read()
    async with http.post("/v1/completions", json={**BODY, "n": 0}) as response:
        assert response.status == 400
    async with http.head("/metrics") as response:
        assert response.status == 200
    values = await metric_values(http)
    requests = "pd_router_requests_total{endpoint=/v1/completions,model=org/tiny-model,status="
    assert values[requests + "200}"] == 2
    assert values[requests + "400}"] == 1
    assert (
        values["pd_router_tokens_total{kind=output,model=org/tiny-model}"]
        == 2 * cluster.num_answer_tokens
    )
    assert values["pd_ttft_seconds_count{model=org/tiny-model}"] == 2
    assert values["pd_e2e_seconds_count{model=org/tiny-model}"] == 2
    assert values["pd_itl_seconds_count{model=org/tiny-model}"] > 2
    for stage in ("router", "reserve", "prefill_queue", "prefill_compute", "kv_transfer"):
        assert values[f"pd_ttft_stage_seconds_count{{model=org/tiny-model,stage={stage}}}"] == 2
    assert values["pd_router_workers{model=org/tiny-model,role=decode,state=ready}"] == 1
    assert values["pd_router_requests_in_flight{model=org/tiny-model}"] == 0


async def test_no_client_makes_a_series(http, cluster: Cluster) -> None:
    """Whatever stands where a label might come from: paths, methods, models, its own names."""

    async def ask(word: str) -> set[str]:
        own = {"user": word, "metadata": {"a": word}, "safety_identifier": word}
        headers = {"x-request-id": word, "authorization": f"Bearer {word}", "x-tenant": word}
        for body in ({**BODY, **own}, {**BODY, "model": word}, {**BODY, word: 1}):
            await (await http.post("/v1/completions", json=body, headers=headers)).read()
        for method, path in (
            *(("GET", f"/{word}"), ("POST", f"/v1/{word}"), ("GET", f"/v1/models/{word}")),
            *((word.upper(), "/v1/completions"), ("DELETE", "/v1/responses/" + word)),
        ):
            await (await http.request(method, path, headers=headers)).read()
        return set(await metric_values(http))

    first = await ask("alpha")
    assert await ask("bravo") == first
    assert not any("alpha" in name or "ALPHA" in name for name in first)


async def test_status_has_the_rates_of_the_last_seconds(http, cluster: Cluster) -> None:
    async with http.get("/status") as response:
        assert (await response.json())["recent"]["ttft_p50_s"] is None
    async with http.post("/v1/completions", json=BODY) as response:
        await response.read()
    async with http.get("/status") as response:
        recent = (await response.json())["recent"]
    assert recent["requests_per_s"] > 0
    assert recent["output_tokens_per_s"] > 0
    assert 0 < recent["ttft_p50_s"] <= recent["ttft_p99_s"]


async def test_failures_have_series_before_the_first_of_them(http, cluster: Cluster) -> None:
    values = await metric_values(http)
    assert (
        values[
            "pd_router_requests_total{endpoint=/v1/chat/completions,model=org/tiny-model,status=502}"
        ]
        == 0
    )
    assert values["pd_router_request_errors_total{code=worker_lost}"] == 0
    assert values["pd_router_migrations_total{model=org/tiny-model,reason=peer_lost}"] == 0


async def test_the_router_takes_cpu_time_and_memory(http, cluster: Cluster) -> None:
    async with asyncio.timeout(60):
        while not (values := await metric_values(http))["pd_process_cpu_seconds_total"]:
            await asyncio.sleep(0.1)
    assert values["pd_process_resident_bytes"] > 10 * 2**20


async def test_prometheus_is_told_where_the_workers_answer(http, cluster: Cluster) -> None:
    async with http.get("/targets") as response:
        assert response.content_type == "application/json"
        groups = await response.json()
    async with http.get("/status") as response:
        workers = (await response.json())["workers"]
    expected = {w["metrics_address"]: w["instance"] for w in workers if w["metrics_address"]}
    found = {group["targets"][0]: group["labels"]["__meta_tandem_worker"] for group in groups}
    assert found == expected
    roles = {group["labels"]["__meta_tandem_role"] for group in groups}
    assert roles == {w["role"] for w in workers if w["metrics_address"]}


async def status_when(
    http: aiohttp.ClientSession, condition: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Ask until the condition holds of the first worker."""
    async with asyncio.timeout(60):
        while True:
            async with http.get("/status") as response:
                status: dict[str, Any] = await response.json()
            if condition(status["workers"][0]):
                return status
            await asyncio.sleep(0.02)


async def test_health_and_status(http, cluster: Cluster) -> None:
    async with http.get("/health") as response:
        assert response.status == 200
    # A worker's load comes with its first heartbeat.
    status = await status_when(http, lambda worker: worker["load"]["num_total_blocks"])
    assert status["model"] == MODEL
    assert status["ready"] is True
    decode, prefill = status["workers"]
    assert (decode["instance"], decode["role"], decode["state"]) == ("decode-0", "decode", "ready")
    assert (prefill["instance"], prefill["rank"]) == ("prefill-0", 0)
    assert decode["load"]["num_total_blocks"] == 10
    cluster.decode.registration.set_draining()
    await status_when(http, lambda worker: worker["state"] == "draining")
    async with http.get("/ready") as response:
        assert (await response.json())["missing"] == ["no decode worker is ready"]


def test_a_taken_port_is_a_config_error() -> None:
    with bind_http("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match=r"router\.port"):
            bind_http("127.0.0.1", port_of(taken))


def write_config(folder: Path, model_dir: Path, **section: object) -> tuple[Path, int, int]:
    ports = []
    for _ in range(2):
        with bind_http("127.0.0.1", 0) as free:
            ports.append(port_of(free))
    config = ClusterConfig(
        model=ModelSection(path=str(model_dir), name=MODEL),
        router=RouterSection(port=ports[0], control_port=ports[1], **section),  # type: ignore[arg-type]
    )
    path = folder / "cluster.toml"
    path.write_text(dump_config(config))
    return path, ports[0], ports[1]


def start(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "router", "--config", str(path), "--grace", "5"],
        env={**os.environ, "TANDEM_SECRET": SECRET},
        stderr=subprocess.PIPE,
    )


@pytest.fixture
async def workers(tokenizer) -> AsyncIterator[list[FakePrefill | FakeDecode]]:
    ids = tokenizer.encode("fox", add_special_tokens=False)

    def script(prompt: object) -> list[int]:
        return [*ids, tokenizer.token_id("<eos>"), *ids * 20]

    workers = [FakePrefill("prefill-0", MODEL, script), FakeDecode("decode-0", MODEL, script)]
    yield workers
    for worker in workers:
        await worker.close()


async def wait_ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                async with http.get("/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_the_router_as_a_process(tmp_path, model_dir, workers) -> None:
    path, port, control_port = write_config(tmp_path, model_dir)
    process = start(path)
    try:
        for worker in workers:
            await worker.start(f"127.0.0.1:{control_port}")
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            await wait_ready(http)
            async with http.post("/v1/completions", json=BODY) as response:
                assert (await response.json())["choices"][0]["text"] == "fox"
        second = start(path)
        _, stderr = await asyncio.to_thread(second.communicate, None, 60)
        assert second.returncode == 2
        assert b"router.port" in stderr
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_several_http_processes_share_port_pool_and_metrics(
    tmp_path, model_dir, workers
) -> None:
    path, port, control_port = write_config(tmp_path, model_dir, http_processes=2)
    process = start(path)
    url = f"http://127.0.0.1:{port}"
    try:
        for worker in workers:
            await worker.start(f"127.0.0.1:{control_port}")
        pids: set[int] = set()

        async def visit(num: int) -> None:
            """One connection each: the kernel spreads them."""
            for _ in range(num):
                async with aiohttp.ClientSession(url) as http:
                    await wait_ready(http)
                    async with http.get("/status") as response:
                        pids.add((await response.json())["pid"])

        async with asyncio.timeout(60):
            while len(pids) < 2:
                await visit(4)
        for _ in range(12):
            async with (
                aiohttp.ClientSession(url) as http,
                http.post("/v1/completions", json=BODY) as response,
            ):
                assert (await response.json())["choices"][0]["text"] == "fox"
        requests = (
            "pd_router_requests_total{endpoint=/v1/completions,model=org/tiny-model,status=200}"
        )
        vllm = f"{{engine=0,finished_reason=stop,model_name={MODEL},role=router}}"
        # The other process hands over what it added up twice a second.
        async with asyncio.timeout(60), aiohttp.ClientSession(url) as http:
            while (values := await metric_values(http))[f"vllm:request_success_total{vllm}"] < 12:
                await asyncio.sleep(0.1)
        assert values[requests] == 12
        assert values[f"vllm:request_success_total{vllm}"] == 12
        assert values[f"pd_process_info{{model={MODEL},rank=0,role=router,worker=router}}"] == 1
        assert values["pd_process_cpu_seconds_total"] > 0
        assert values["pd_router_workers{model=org/tiny-model,role=prefill,state=ready}"] == 1
        os.kill(victim := min(pids), signal.SIGKILL)
        pids.clear()
        async with asyncio.timeout(60):
            while len(pids - {victim}) < 2:
                await visit(4)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        process.kill()
        process.communicate()


RIGHTS = frozenset({Right.INFERENCE, Right.OPERATIONS})


async def pids_of(url: str, number: int, headers: dict[str, str] | None = None) -> set[int]:
    """The HTTP processes behind a port; one connection each: the kernel spreads them."""
    pids: set[int] = set()
    async with asyncio.timeout(60):
        while len(pids) < number:
            async with aiohttp.ClientSession(url, headers=headers) as http:
                await wait_ready(http)
                headers = {"Authorization": f"Bearer {SECRET}"}
                async with http.get("/status", headers=headers) as response:
                    pids.add((await response.json())["pid"])
    return pids


@pytest.mark.slow
async def test_several_http_processes_count_a_key_together(tmp_path, model_dir, workers) -> None:
    most, key, keys_file = 6, new_key(), tmp_path / "keys.toml"
    limits = KeyLimits(requests_per_minute=most)
    add_to_file(
        keys_file, KeyRecord(name="alice", sha256=hash_key(key), limits=limits, rights=RIGHTS)
    )
    options = {"http_processes": 2, "keys_file": str(keys_file)}
    path, port, control_port = write_config(tmp_path, model_dir, **options)
    process = start(path)
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
    try:
        for worker in workers:
            await worker.start(f"127.0.0.1:{control_port}")
        await pids_of(url, 2, headers)
        statuses, began = [], time.monotonic()
        for _ in range(4 * most):  # one connection each: the kernel spreads them
            async with (
                aiohttp.ClientSession(url, headers=headers) as http,
                http.post("/v1/completions", json=BODY) as response,
            ):
                statuses.append(response.status)
        flowed_in = (time.monotonic() - began) * most / 60
        assert set(statuses) == {200, 429}
        assert most <= statuses.count(200) <= most + flowed_in + 1
        async with aiohttp.ClientSession(url) as http:
            values = await metric_values(http)
        admitted = values["pd_router_key_requests_total{key=alice,outcome=admitted}"]
        assert admitted == statuses.count(200)
        assert values["pd_router_keys"] == 1
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_requests_of_an_http_process_that_died_hold_no_place_of_their_key(
    tmp_path, model_dir, workers
) -> None:
    key, keys_file = new_key(), tmp_path / "keys.toml"
    limits = KeyLimits(max_concurrent_requests=1)
    add_to_file(
        keys_file, KeyRecord(name="alice", sha256=hash_key(key), limits=limits, rights=RIGHTS)
    )
    options = {"http_processes": 2, "keys_file": str(keys_file)}
    path, port, control_port = write_config(tmp_path, model_dir, **options)
    process = start(path)
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}

    async def ask() -> int:
        async with (
            aiohttp.ClientSession(url, headers=headers) as http,
            http.post("/v1/completions", json=BODY) as response,
        ):
            return response.status

    try:
        for worker in workers:
            await worker.start(f"127.0.0.1:{control_port}")
        pids = await pids_of(url, 2, headers)
        prefill = workers[0]
        prefill.holds_runs = True
        held = asyncio.create_task(ask())
        async with asyncio.timeout(60):
            while not prefill.seen:
                await asyncio.sleep(0.01)
        assert await ask() == 429
        prefill.holds_runs = False
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await held
        assert not await pids_of(url, 2, headers) & pids
        assert await ask() == 200
    finally:
        process.kill()
        process.communicate()
