"""The console's endpoints on a real router with fake workers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.http.console import console as console_module
from router.http.console.page import load_page
from runtime.pb import registry_pb2
from tests.router.conftest import MODEL, Cluster, StartRouter
from tests.router.fakes import FakeDecode, FakePrefill
from tests.router.http.console.crowd import Crowd, ask
from tests.router.http.test_operations import start, wait_ready, workers, write_config
from tests.waiting import until

__all__ = ["workers"]
FOLDER = Path(console_module.__file__).parent
STREAM = {"Accept": "text/event-stream"}
BODY = {"model": MODEL, "prompt": "a secret of mine", "max_tokens": 100}


async def snapshot_of(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/console/data") as response:
        assert response.status == 200
        snapshot: dict[str, Any] = await response.json()
        return snapshot


async def snapshot_when(http: aiohttp.ClientSession, condition) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            snapshot = await snapshot_of(http)
            if condition(snapshot):
                return snapshot
            await asyncio.sleep(0.05)


async def next_event(stream: aiohttp.StreamReader) -> tuple[str, Any]:
    """The next event that has a name, and its data."""
    name = ""
    async with asyncio.timeout(60):
        async for line in stream:
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: ") and name:
                return name, json.loads(line[6:])
    raise AssertionError("the stream has ended")


def events_of(snapshot: dict[str, Any]) -> list[tuple[str, str]]:
    return [(event["kind"], event["instance"]) for event in snapshot["requests"]["events"]]


async def test_the_page_is_one_document_that_may_load_nothing(http, cluster: Cluster) -> None:
    async with http.get("/console") as response:
        assert response.status == 200
        text, headers = await response.text(), response.headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    # data: is the empty icon, and the SVG namespace is a name.
    addresses = set(re.findall(r"//[\w.]+/[\w/]+", text))
    assert addresses == {"//www.w3.org/2000/svg"}
    assert not re.search(r"\son\w+=|\sstyle=|<script src|<link rel=.stylesheet", text)
    async with http.get("/console", headers={"If-None-Match": headers["ETag"]}) as response:
        assert response.status == 304


def test_the_files_of_the_page_are_short_and_set_no_markup() -> None:
    files = [path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js")]
    assert len(files) >= 3
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert text.isascii(), path
        assert len(text.splitlines()) <= 400, path
        assert max(map(len, text.splitlines())) <= 130, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert load_page().body.count(b"<script>") == 1


async def test_a_browser_is_led_to_the_page_and_nobody_else(http, cluster: Cluster) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with http.get("/", headers=browser, allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (302, "/console")
    async with http.get("/") as response:
        assert response.status == 404
        error = (await response.json())["error"]
    assert error["code"] == "unknown_url"
    assert "/v1/models" in error["message"]


async def test_it_is_read_only(http, cluster: Cluster) -> None:
    for path in ("/console", "/console/data"):
        for method in ("POST", "PUT", "DELETE"):
            async with http.request(method, path) as response:
                assert response.status == 405


async def test_requests_are_shown_without_their_text(http, cluster: Cluster) -> None:
    for _ in range(3):
        async with http.post(
            "/v1/completions", json=BODY, headers={"x-request-id": "mine"}
        ) as response:
            text = (await response.json())["choices"][0]["text"]
    snapshot = await snapshot_when(http, lambda s: s["requests"]["num_finished"] == 3)
    rows = snapshot["requests"]["ttft"]
    assert [row["name"] for row in rows] == ["p50", "p90", "p99"]
    for row in rows:
        assert len(row["parts_s"]) == 7
        # Not equal: the fake prefill tells of times that it did not take.
        assert sum(row["parts_s"][:5]) >= 0.99 * row["ttft_s"]
        assert row["parts_s"][3] == pytest.approx(0.003), "as the fake prefill says"
    slowest = snapshot["requests"]["slowest"][0]
    assert slowest["request_id"].startswith("mine.")
    assert (slowest["prefill"], slowest["decode"]) == ("prefill-0/0", "decode-0/0")
    assert (slowest["model"], slowest["key_name"]) == (MODEL, "")
    assert slowest["num_output_tokens"] == cluster.num_answer_tokens
    raw = json.dumps(snapshot)
    assert "secret" not in raw
    assert text not in raw


async def test_what_is_under_way_is_shown_with_its_phase(http, cluster: Cluster) -> None:
    cluster.prefill.holds_runs = True
    request = asyncio.create_task(ask(cluster.url, 1))
    busy = await snapshot_when(http, lambda s: s["requests"]["live"])
    (live,) = busy["requests"]["live"]
    assert busy["requests"]["num_in_flight"] == busy["requests"]["num_live"] == 1
    assert (live["phase"], live["prefill"]) == ("waiting for prefill", "prefill-0/0")
    cluster.prefill.go_on.set()
    await request
    after = await snapshot_when(http, lambda s: not s["requests"]["live"])
    assert after["requests"]["num_in_flight"] == 0


async def test_failures_of_workers_are_ours(start_router: StartRouter) -> None:
    cluster = await start_router()
    await cluster.add_prefill()
    async with aiohttp.ClientSession(cluster.url) as http:
        async with http.post("/v1/completions", json=BODY) as response:
            assert response.status == 503, "there is no decode"
        snapshot = await snapshot_when(http, lambda s: s["requests"]["errors"])
    (row,) = snapshot["requests"]["errors"]
    assert (row["code"], row["is_ours"]) == ("server_not_ready", True)


async def test_failed_requests_are_counted_by_code(http, cluster: Cluster) -> None:
    async with http.post("/v1/completions", json={**BODY, "n": 0}) as response:
        assert response.status == 400
    async with http.get("/nowhere") as response:
        assert response.status == 404
    snapshot = await snapshot_when(http, lambda s: s["requests"]["errors"])
    (row,) = snapshot["requests"]["errors"]
    assert (row["num"], row["num_recent"], row["is_ours"]) == (1, 1, False)


async def test_joins_drains_losses_and_returns_are_events(start_router: StartRouter) -> None:
    cluster = await start_router(lease_ttl_s=3.0)
    async with aiohttp.ClientSession(cluster.url) as http:
        assert not (await snapshot_of(http))["ready"]
        await cluster.add_prefill()
        first = await cluster.add_decode()
        ready = await snapshot_when(http, lambda s: s["ready"])
        assert events_of(ready) == [("joined", "decode-0"), ("joined", "prefill-0")]
        await first.die()
        lost = await snapshot_when(http, lambda s: s["pool"]["workers"][-1]["state"] == "lost")
        assert events_of(lost)[0] == ("lost", "decode-0")
        second = await cluster.add_decode("decode-0")
        await snapshot_when(http, lambda s: s["pool"]["workers"][-1]["state"] == "ready")
        second.set_draining()
        await snapshot_when(http, lambda s: s["pool"]["workers"][-1]["state"] == "draining")
        await second.close()
        left = await snapshot_when(http, lambda s: len(s["pool"]["workers"]) == 1)
        assert events_of(left)[:3] == [
            ("left", "decode-0"),
            ("draining", "decode-0"),
            ("joined", "decode-0"),
        ]


async def test_rates_come_from_renewals(start_router: StartRouter) -> None:
    cluster = await start_router(lease_ttl_s=0.6)
    prefill, tokens = await cluster.add_prefill(), iter(range(0, 10**9, 1000))

    def report() -> registry_pb2.WorkerLoad:
        load = registry_pb2.WorkerLoad(num_tokens_done=(num := next(tokens)))
        load.received.add(peer="prefill-0/0", num_bytes=5 * num)
        return load

    decode = FakeDecode("decode-0", MODEL, cluster.script, report=report)
    cluster.decodes.append(decode)
    await decode.start(cluster.control)
    async with (
        aiohttp.ClientSession(cluster.url, headers=STREAM) as http,
        http.get("/console/data") as response,
    ):
        while True:
            name, data = await next_event(response.content)
            if name == "snapshot" and data["pool"]["pairs"]:
                break
    (pair,) = data["pool"]["pairs"]
    assert (pair["prefill"], pair["decode"]) == (f"{prefill.instance}/0", "decode-0/0")
    assert pair["bytes_s"] == pytest.approx(5 * data["pool"]["output_tokens_s"], rel=0.01)


async def test_one_snapshot_a_second_is_built_for_all_and_none_for_nobody(
    cluster: Cluster, monkeypatch
) -> None:
    monkeypatch.setattr(console_module, "INTERVAL_S", 0.2)
    console = cluster.service._http._console
    built = 0
    build = console._observer.snapshot

    def counted():
        nonlocal built
        built += 1
        return build()

    monkeypatch.setattr(console._observer, "snapshot", counted)
    await asyncio.sleep(1.2)
    assert built == 0
    async with aiohttp.ClientSession(cluster.url, headers=STREAM) as http:
        streams = [await http.get("/console/data") for _ in range(8)]
        for stream in streams:
            names = [(await next_event(stream.content))[0] for _ in range(4)]
            assert names[:2] == ["history", "snapshot"]
        assert built < 16, "eight viewers of at least three snapshots"
        for stream in streams:
            stream.close()
    await until(lambda: console._num_viewers == 0)
    before = built
    await asyncio.sleep(1.2)
    assert built == before


async def test_viewers_are_bounded(cluster: Cluster, monkeypatch) -> None:
    monkeypatch.setattr(console_module, "MAX_VIEWERS", 1)
    async with aiohttp.ClientSession(cluster.url, headers=STREAM) as http:
        async with http.get("/console/data") as first:
            assert (await next_event(first.content))[0] == "history"
            async with http.get("/console/data") as second:
                assert second.status == 503
                assert (await second.json())["error"]["code"] == "too_many_viewers"
        await until(lambda: cluster.service._http._console._num_viewers == 0)
        async with http.get("/console/data") as third:
            assert third.status == 200


async def test_a_stream_ends_with_the_router(start_router: StartRouter) -> None:
    cluster = await start_router()
    async with (
        aiohttp.ClientSession(cluster.url, headers=STREAM) as http,
        http.get("/console/data") as response,
    ):
        await next_event(response.content)
        cluster.service._http._console.close()
        async with asyncio.timeout(60):
            await response.read()


async def test_a_fault_of_the_console_does_not_end_the_router(
    cluster: Cluster, http, monkeypatch, caplog
) -> None:
    console = cluster.service._http._console

    def fail(loop_lag_s: float) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(console._observer, "keep_history", fail)
    await until(lambda: "the console failed" in caplog.text)
    await asyncio.sleep(1.2)
    assert caplog.text.count("the console failed") == 1
    async with http.post("/v1/completions", json=BODY) as response:
        assert response.status == 200


async def test_a_hundred_registrations_are_followed(start_router: StartRouter) -> None:
    cluster = await start_router(lease_ttl_s=5.0)
    crowd = Crowd(cluster.control, cluster.tokenizer)
    async with aiohttp.ClientSession(cluster.url) as http:
        try:
            await crowd.start(20, 80)
            full = await snapshot_when(
                http,
                lambda s: len(s["pool"]["workers"]) == 100 and s["pool"]["num_pairs"] > 200,
            )
            roles = [row["role"] for row in full["pool"]["workers"]]
            assert roles == ["prefill"] * 20 + ["decode"] * 80
            assert len({row["host"] for row in full["pool"]["workers"]}) == 13
            assert full["pool"]["output_tokens_s"] > 0
            crowd.decodes[3].set_draining()
            crowd.decodes[5].fall_silent()

            def changed(snapshot: dict[str, Any]) -> bool:
                states = {row["name"]: row["state"] for row in snapshot["pool"]["workers"]}
                return (states["decode-3/0"], states["decode-5/0"]) == ("draining", "lost")

            after = await snapshot_when(http, changed)
            assert {("draining", "decode-3"), ("lost", "decode-5")} <= set(events_of(after))
        finally:
            await crowd.close()


@pytest.mark.slow
async def test_several_http_processes_are_one_picture(
    tmp_path, model_dir, workers: list[FakePrefill | FakeDecode]
) -> None:
    path, port, control_port = write_config(tmp_path, model_dir, http_processes=2)
    process = start(path)
    url = f"http://127.0.0.1:{port}"
    try:
        for worker in workers:
            await worker.start(f"127.0.0.1:{control_port}")
        async with aiohttp.ClientSession(url) as http:
            await wait_ready(http)
        async with (
            aiohttp.ClientSession(url, headers=STREAM) as http,
            http.get("/console/data") as response,
        ):
            data: dict[str, Any] = {}
            while len(data.get("requests", {}).get("pids", ())) != 2:
                _, data = await next_event(response.content)
            num_answered = 0
            while num_answered < 12:  # a connection each: the kernel spreads them
                async with (
                    aiohttp.ClientSession(url) as other,
                    other.post("/v1/completions", json=BODY) as answer,
                ):
                    num_answered += answer.status == 200
            while True:
                name, data = await next_event(response.content)
                requests = data.get("requests", {})
                if name == "snapshot" and requests["num_finished"] == 12:
                    break
        assert (len(requests["pids"]), data["num_processes"]) == (2, 2)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.communicate()
