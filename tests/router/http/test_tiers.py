"""Tiers over HTTP: which one a request gets, and what client, workers and metrics are told."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.keys.file import add_to_file, read_keys, remove_from_file
from router.keys.record import KeyRecord, hash_key, new_key
from runtime.config import TierSection
from runtime.errors import ConfigError
from tests.router.conftest import MODEL, Cluster, StartRouter
from tests.waiting import until

TIERS = (
    TierSection(name="max", order=0, ttft_ms=60_000, tpot_ms=60_000, share=0.5, open=True),
    TierSection(name="base", order=1, share=0.1, open=True),
)
CLOSED = (dataclasses.replace(TIERS[0], open=False), TIERS[1])
BODY: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 4, "temperature": 0}


async def started(start_router: StartRouter, **options: object) -> Cluster:
    cluster = await start_router(**options)
    await cluster.add_pair()
    return cluster


async def post(
    cluster: Cluster, path: str = "/v1/completions", key: str = "", **fields: object
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(cluster.url) as http,
        http.post(path, json={**BODY, **fields}, headers=headers) as response,
    ):
        return response.status, await response.json()


async def metrics_of(cluster: Cluster) -> list[str]:
    async with aiohttp.ClientSession(cluster.url) as http, http.get("/metrics") as response:
        return (await response.text()).splitlines()


def add(path: Path, name: str, **fields: Any) -> str:
    key = new_key()
    add_to_file(path, KeyRecord(name=name, sha256=hash_key(key), **fields))
    return key


@pytest.mark.parametrize(
    ("asked", "served"),
    [("max", "max"), ("base", "base"), ("auto", "base"), ("default", "base"), (None, "base")],
)
async def test_the_tier_that_serves_is_told_to_client_and_workers(
    start_router: StartRouter, asked: str | None, served: str
) -> None:
    cluster = await started(start_router, tiers=TIERS)
    status, answer = await post(cluster, service_tier=asked)
    assert (status, answer["service_tier"]) == (200, served)
    wanted = {tier.name: tier for tier in TIERS}[served]
    for message in (cluster.prefill.seen[0].standing, cluster.decode.seen[0].standing):
        assert (message.tier, message.order, message.share) == (
            served,
            wanted.order,
            wanted.share,
        )
    left_s = cluster.prefill.seen[0].standing.ttft_left_s
    assert left_s == 0 if served == "base" else 0 < left_s < 60


async def test_every_chunk_of_a_stream_names_the_tier(start_router: StartRouter) -> None:
    cluster = await started(start_router, tiers=TIERS)
    body = {**BODY, "stream": True, "service_tier": "max"}
    async with (
        aiohttp.ClientSession(cluster.url) as http,
        http.post("/v1/completions", json=body) as response,
    ):
        lines = (await response.text()).split("\n\n")
    chunks = [line for line in lines if line.startswith("data: {")]
    assert chunks
    assert all('"service_tier":"max"' in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ],
)
async def test_every_api_of_generation_has_tiers(
    start_router: StartRouter, path: str, fields: dict[str, Any]
) -> None:
    cluster = await started(start_router, tiers=TIERS)
    body = {"model": MODEL, "service_tier": "max", **fields}
    async with (
        aiohttp.ClientSession(cluster.url) as http,
        http.post(path, json=body) as response,
    ):
        answer = await response.json()
    assert response.status == 200
    assert cluster.prefill.seen[0].standing.tier == "max"
    assert answer.get("service_tier", "max") == "max"


async def test_a_tier_that_is_none_is_refused_by_name(start_router: StartRouter) -> None:
    cluster = await started(start_router, tiers=TIERS)
    status, answer = await post(cluster, service_tier="gold")
    assert (status, answer["error"]["param"]) == (400, "service_tier")
    assert "Fix: send one of auto, default, max, base" in answer["error"]["message"]


async def test_without_tiers_the_field_says_nothing(start_router: StartRouter) -> None:
    cluster = await started(start_router)
    status, answer = await post(cluster, service_tier="gold", priority=7)
    assert status == 200
    assert "service_tier" not in answer
    assert not cluster.prefill.seen[0].HasField("standing")
    assert not any(line.startswith("pd_tier_") for line in await metrics_of(cluster))


async def test_priority_is_bounded_by_its_setting(start_router: StartRouter) -> None:
    cluster = await started(start_router, max_priority=10)
    assert (await post(cluster, priority=-10))[0] == 200
    assert cluster.prefill.seen[0].standing.priority == -10
    status, answer = await post(cluster, priority=11)
    assert (status, answer["error"]["param"]) == (400, "priority")
    assert "from -10 to 10" in answer["error"]["message"]


async def test_a_key_says_which_tiers_it_may_have(
    start_router: StartRouter, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    rich = add(file, "rich", tiers=("base", "max"), tier="max")
    poor = add(file, "poor", tiers=("base",))
    anyone = add(file, "anyone")
    eager = add(file, "eager", tier="max")
    lost = add(file, "lost", tiers=("gold",))
    cluster = await started(start_router, tiers=CLOSED, keys_file=str(file))
    assert (await post(cluster, key=rich))[1]["service_tier"] == "max"
    assert (await post(cluster, key=rich, service_tier="base"))[1]["service_tier"] == "base"
    assert (await post(cluster, key=poor))[1]["service_tier"] == "base"
    assert (await post(cluster, key=anyone))[1]["service_tier"] == "base"
    assert (await post(cluster, key=eager))[1]["service_tier"] == "max"
    for key, asked, fix in (
        (poor, "max", "send one of base, or a key that may"),
        (anyone, "max", "send one of base, or a key that may"),
        (lost, "auto", "Fix: a key that may"),
    ):
        status, answer = await post(cluster, key=key, service_tier=asked)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (
            403,
            "service_tier",
            "service_tier_not_allowed",
        )
        assert fix in error["message"]


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_tier_before_the_default_is_for_keys_that_list_it_unless_it_is_open(
    start_router: StartRouter, tmp_path: Path, is_open: bool
) -> None:
    file = tmp_path / "keys.toml"
    key = add(file, "anyone")
    tiers = TIERS if is_open else CLOSED
    for own in ("", key):
        cluster = await started(start_router, tiers=tiers, keys_file=str(file) if own else "")
        status, answer = await post(cluster, key=own, service_tier="max")
        assert status == (200 if is_open else 403)
        if not is_open:
            assert "'max'" in answer["error"]["message"]
            assert "--tier max" in answer["error"]["message"]
        assert (await post(cluster, key=own))[1]["service_tier"] == "base"
        headers = {"Authorization": f"Bearer {own}"} if own else {}
        async with (
            aiohttp.ClientSession(cluster.url, headers=headers) as http,
            http.get("/v1/models") as response,
        ):
            (card,) = (await response.json())["data"]
        assert card["service_tiers"] == (["max", "base"] if is_open else ["base"])


async def test_a_key_of_a_tier_that_is_not_configured_is_told_at_load_and_at_reload(
    start_router: StartRouter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("runtime.rpc.renewal.CHECK_S", 0.0)
    file = tmp_path / "keys.toml"
    add(file, "right", tiers=("base",))
    add(file, "lost", tiers=("gold",))
    cluster = await start_router(tiers=TIERS, keys_file=str(file))
    assert "key=lost" in caplog.text
    assert "'gold'" in caplog.text
    assert "answered 403" in caplog.text
    assert "key=right" not in caplog.text
    assert "pd_router_keys_of_unknown_tiers 1.0" in await metrics_of(cluster)
    caplog.clear()
    add(file, "later", tiers=("ruby", "base"), tier="ruby")
    await until(lambda: "key=later" in caplog.text)
    assert "'ruby'" in caplog.text
    assert "requests that name none are of 'base'" in caplog.text
    assert "pd_router_keys_of_unknown_tiers 2.0" in await metrics_of(cluster)
    for name in ("lost", "later"):
        remove_from_file(file, name)
    async with asyncio.timeout(60):
        while "pd_router_keys_of_unknown_tiers 0.0" not in await metrics_of(cluster):
            await asyncio.sleep(0.05)


def test_tiers_of_a_key_survive_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    add(file, "rich", tiers=("max", "base"), tier="base")
    (record,) = read_keys(file)
    assert (record.tiers, record.tier) == (("max", "base"), "base")
    with pytest.raises(ConfigError, match=r"keys\.x\.tier = 'max'.*one of base"):
        add(file, "x", tiers=("base",), tier="max")


async def test_status_has_a_row_for_each_tier(start_router: StartRouter) -> None:
    cluster = await started(start_router, tiers=TIERS)
    cluster.decode.hold_after = 2

    async def rows() -> dict[str, Any]:
        async with aiohttp.ClientSession(cluster.url) as http, http.get("/status") as response:
            return {row.pop("name"): row for row in (await response.json())["tiers"]}

    nothing = {"met": 0, "missed": 0}
    idle = {"num_requests_waiting": 0, "num_requests_running": 0}
    assert list(await rows()) == ["max", "base"]
    assert (await rows())["max"] == {**idle, "targets": {"ttft": nothing, "tpot": nothing}}
    asking = asyncio.create_task(post(cluster, service_tier="max", n=2, temperature=1))
    async with asyncio.timeout(60):
        while (await rows())["max"]["num_requests_running"] != 2:
            await asyncio.sleep(0.05)
    assert (await rows())["base"]["num_requests_running"] == 0
    cluster.decode.go_on.set()
    assert (await asking)[0] == 200
    async with asyncio.timeout(60):
        while (await rows())["max"]["num_requests_running"]:
            await asyncio.sleep(0.05)
    met = {"met": 2, "missed": 0}
    assert (await rows())["max"]["targets"] == {"ttft": met, "tpot": met}
    assert (await rows())["base"]["targets"] == {"ttft": nothing, "tpot": nothing}


async def test_goodput_is_counted_by_tier(start_router: StartRouter) -> None:
    hard = TierSection(name="hard", order=2, ttft_ms=0.001, tpot_ms=0.001)
    cluster = await started(start_router, tiers=(*TIERS, hard))
    for tier in ("max", "base", "hard"):
        assert (await post(cluster, service_tier=tier))[0] == 200
    lines = await metrics_of(cluster)
    for line in (
        'pd_tier_targets_total{result="met",target="ttft",tier="max"} 1.0',
        'pd_tier_targets_total{result="met",target="tpot",tier="max"} 1.0',
        'pd_tier_targets_total{result="met",target="ttft",tier="base"} 0.0',
        'pd_tier_targets_total{result="missed",target="ttft",tier="hard"} 1.0',
        'pd_tier_output_tokens_total{result="met",tier="max"} 4.0',
        'pd_tier_output_tokens_total{result="met",tier="base"} 4.0',
        'pd_tier_output_tokens_total{result="missed",tier="hard"} 4.0',
        'pd_tier_ttft_seconds_count{tier="base"} 1.0',
        'pd_tier_requests_waiting{tier="max"} 0.0',
        'pd_tier_requests_running{tier="max"} 0.0',
        'pd_tier_refused_total{tier="max"} 0.0',
    ):
        assert line in lines, line
