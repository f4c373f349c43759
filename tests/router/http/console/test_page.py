"""The page in a headless Chromium, in front of a real router with a hundred fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from bench.ranks.played import Fault, play
from engine.experts.placements import ExpertPlacements
from router.keys.file import add_to_file, remove_from_file
from router.keys.record import KeyRecord, Right, hash_key, new_key
from router.pool.members import WorkerKey
from runtime.pb import registry_pb2
from runtime.stragglers.rank_picture import block_to_proto
from tests.router.conftest import MODEL, Cluster, StartRouter
from tests.router.fakes import FakeDecode
from tests.router.http.console.browser import Tab, chromium, open_tab
from tests.router.http.console.crowd import Crowd, ask
from tests.router.pool.test_rank_watch import blocks_of
from tests.waiting import until
from tests.worker.counted_rank import EXPERTS, Rank, make_experts
from worker.expert_service import add_experts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no chromium: apt-get install chromium"),
]
HOSTILE = "<img src=x onerror=alert(1)>"
ROWS = "document.querySelectorAll('[data-name]').length"
CHOSEN = "document.querySelector('.chosen').dataset.name"
ACTIVE = "document.activeElement.dataset.name"


@pytest.fixture
async def tab() -> AsyncIterator[Tab]:
    async with open_tab() as (tab, _):
        await tab.resize(1280, 900)
        yield tab
        assert tab.complaints == []


async def text_of(tab: Tab, selector: str) -> str:
    text = await tab.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")
    assert isinstance(text, str)
    return text


async def open_page(tab: Tab, cluster: Cluster, num_workers: int) -> None:
    await tab.goto(f"{cluster.url}/console")
    await tab.until(f"{ROWS} === {num_workers}")


async def boxes(tab: Tab) -> str:
    """Where every tile stands, and from where to where every panel and column goes."""
    return await tab.evaluate(
        "JSON.stringify([...document.querySelectorAll('.panel, .tile, thead th')].map((node) => {"
        "const box = node.getBoundingClientRect();"
        "const isTile = node.matches('.tile');"
        "return [box.left, box.width, ...(isTile ? [box.top, box.height] : [])].map(Math.round); "
        "}))"
    )


async def page_height(tab: Tab) -> float:
    foot = "document.querySelector('footer').getBoundingClientRect().bottom + window.scrollY"
    height = await tab.evaluate(foot)
    assert isinstance(height, (int, float))
    return height


async def show(tab: Tab, **requests: object) -> None:
    """Draw the page with these of its requests, and hear of the router no more."""
    await tab.evaluate(
        f"paused = true; Object.assign(snapshot.requests, {json.dumps(requests)}); show()"
    )


def failures(num: int) -> list[dict[str, object]]:
    """By code; the first is ours."""
    return [{"code": f"code_{n}", "is_ours": n == 0, "num": 3, "num_recent": 2} for n in range(num)]


def full_lists() -> dict[str, object]:
    """More of everything than there is room for."""
    common = {
        "model": MODEL,
        "key_name": "app",
        "prefill": "prefill-0/0",
        "decode": "decode-0/0",
        "num_prompt_tokens": 1,
        "num_output_tokens": 1,
    }
    live = {**common, "phase": "decode", "age_s": 1.0, "num_migrations": 0}
    slow = {**common, "at": 0.0, "ttft_s": 1.0, "total_s": 2.0, "parts_s": [0.2] * 7}
    event = {"kind": "joined", "role": "decode", "instance": "decode-0", "ranks": [0], "text": ""}
    return {
        "live": [{**live, "request_id": f"live-{n:030}"} for n in range(12)],
        "slowest": [{**slow, "request_id": f"slow-{n:030}"} for n in range(8)],
        "events": [{**event, "at": 1000.0 * n} for n in range(60)],
        "errors": failures(20),
    }


async def test_few_workers_are_a_table_that_follows_the_pool(cluster: Cluster, tab: Tab) -> None:
    await open_page(tab, cluster, 2)
    before = await boxes(tab)
    assert "2 workers" in await text_of(tab, "#covers")
    assert await tab.evaluate("document.querySelector('#grid').hidden")
    await ask(cluster.url, 5)
    await tab.until("document.querySelector('#slow tbody').textContent.includes('req-')")
    assert "5 requests" in await text_of(tab, "#ttft-note")
    assert "ms" in await text_of(tab, "#bars b")
    await cluster.add_decode("decode-1")
    await tab.until(f"{ROWS} === 3")
    cluster.decode.set_draining()
    await tab.until("document.querySelector('#counts').textContent.includes('1 draining')")
    assert "draining" in await text_of(tab, "#events ol")
    assert await boxes(tab) == before, "nothing has moved"


async def test_all_of_a_small_cluster_fits_a_screen(cluster: Cluster, tab: Tab) -> None:
    await tab.resize(1280, 1000)
    await open_page(tab, cluster, 2)
    await ask(cluster.url, 5)
    await tab.until("document.querySelector('#slow tbody').textContent.includes('req-')")
    some = await page_height(tab)
    await show(tab, **full_lists())
    full = await page_height(tab)
    assert some < full <= 1000
    await show(tab, live=[], slowest=[])
    assert await page_height(tab) < full


async def test_callers_errors_are_apart_and_red_is_for_ours(cluster: Cluster, tab: Tab) -> None:
    await open_page(tab, cluster, 2)
    async with (
        aiohttp.ClientSession(cluster.url) as http,
        http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "n": 0}) as response,
    ):
        assert response.status == 400
    await tab.until("document.querySelector('#errors tbody').textContent.includes('caller')")
    tile = "document.querySelector('#tiles').lastChild"
    level = f"{tile}.dataset.level"
    assert "callers' own: 1" in await tab.evaluate(f"{tile}.textContent")
    assert await tab.evaluate(level) == ""
    await show(tab, errors=failures(2))
    assert await tab.evaluate(level) == "bad"
    first = "document.querySelector('#errors tbody tr').textContent"
    assert await tab.evaluate(first) == "code_0ours23"


async def test_ids_are_whole_and_are_copied_by_a_click(cluster: Cluster, tab: Tab) -> None:
    await open_page(tab, cluster, 2)
    await ask(cluster.url, 1)
    await tab.until("document.querySelector('#slow tbody').textContent.includes('req-')")
    await tab.evaluate("navigator.clipboard.writeText = async (text) => { copied = text; }")
    await show(tab)
    cell = "document.querySelector('#slow .id')"
    (whole,) = await tab.evaluate("snapshot.requests.slowest.map((item) => item.request_id)")
    assert await tab.evaluate(f"{cell}.title.split('\\n')[0]") == whole
    assert len(await tab.evaluate(f"{cell}.textContent")) < len(whole)
    await tab.evaluate(f"{cell}.click()")
    await tab.until(f"{cell}.textContent === 'copied'")
    assert await tab.evaluate("copied") == whole
    assert not await tab.evaluate("document.querySelector('#drawer').open")
    assert MODEL in await text_of(tab, "#slow tbody tr")


async def send(tab: Tab, text: str) -> None:
    await tab.press("s")
    await tab.until("document.querySelector('#prompt').open")
    await tab.evaluate(
        f"document.querySelector('#prompt-text').value = {json.dumps(text)};"
        "document.querySelector('#prompt-send').click()"
    )


async def test_a_prompt_is_answered_without_a_key_where_none_is_asked_for(
    cluster: Cluster, tab: Tab
) -> None:
    await open_page(tab, cluster, 2)
    await send(tab, "the quick brown fox")
    await tab.until("document.querySelector('#prompt-note').textContent.includes('ended by stop')")
    assert await text_of(tab, "#prompt-answer") == cluster.answer
    assert f"{cluster.num_answer_tokens} out" in await text_of(tab, "#prompt-note")
    assert await text_of(tab, "#prompt-path") == "/v1/chat/completions"
    assert await tab.evaluate("document.querySelector('#prompt-key')") is None
    await tab.evaluate("document.querySelector('#prompt-tokens').value = 0")
    await send(tab, "the quick brown fox")
    await tab.until("document.querySelector('#prompt-note').textContent.includes('max_tokens')")
    assert all("400" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


async def test_a_prompt_needs_a_key_and_no_session_is_good_for_it(
    start_router: StartRouter, tab: Tab, tmp_path: Path
) -> None:
    operator, client, file = new_key(), new_key(), tmp_path / "keys.toml"
    for key, name, right in (
        (operator, "ops", Right.OPERATIONS),
        (client, "app", Right.INFERENCE),
    ):
        record = KeyRecord(name=name, sha256=hash_key(key), rights=frozenset({right}))
        add_to_file(file, record)
    cluster = await start_router(keys_file=str(file))
    await cluster.add_pair()
    await tab.goto(f"{cluster.url}/console")
    await tab.until("document.querySelector('#key') !== null")
    await tab.evaluate(
        f"document.querySelector('#key').value = {json.dumps(operator)};"
        "document.querySelector('form').requestSubmit()"
    )
    await tab.until(f"{ROWS} === 2")
    await send(tab, "the quick brown fox")
    await tab.until("document.querySelector('#prompt-note').textContent.includes('is needed')")
    for key, told in ((operator, "inference"), (client, "ended by stop")):
        await tab.evaluate(
            f"document.querySelector('#prompt-key').value = {json.dumps(key)};"
            "document.querySelector('#prompt-send').click()"
        )
        await tab.until(
            f"document.querySelector('#prompt-note').textContent.includes({json.dumps(told)})"
            " && !sending"
        )
    assert await text_of(tab, "#prompt-answer") == cluster.answer
    assert client not in await tab.evaluate("location.href + JSON.stringify(localStorage)")
    await tab.until("document.querySelector('#slow tbody').textContent.includes('app')")
    # The browser itself says what was answered 401 (the form) or 403.
    assert all("401" in one or "403" in one for one in tab.complaints)
    tab.complaints.clear()


async def test_drafts_of_decode_ranks_are_a_panel_where_there_are_any(
    start_router: StartRouter, tab: Tab
) -> None:
    """Accept length, acceptance by position, drafts a second and the budget, as renewals come."""
    cluster = await start_router(lease_ttl_s=0.6)
    await cluster.add_pair()
    await open_page(tab, cluster, 2)
    hidden = "document.querySelector('#drafts').hidden"
    assert await tab.evaluate(hidden)
    numbers = itertools.count(1)

    def report() -> registry_pb2.WorkerLoad:
        num = next(numbers)
        drafts = registry_pb2.DraftCounts(
            num_verifications=100 * num,
            verified=[100 * num, 50 * num, 0],
            accepted=[80 * num, 20 * num, 0],
            budget=2,
        )
        return registry_pb2.WorkerLoad(drafts=drafts)

    drafting = FakeDecode("decode-1", MODEL, cluster.script, report=report)
    cluster.decodes.append(drafting)
    await drafting.start(cluster.control)
    await tab.until(f"!{hidden}")
    await tab.until("document.querySelector('#drafts tbody').textContent.includes('2.00')")
    row = "[...document.querySelectorAll('#drafts tbody tr:not([hidden])')]"
    rows = await tab.evaluate(f"{row}.map((one) => [...one.cells].map((cell) => cell.textContent))")
    ((name, length, shares, rate, budget),) = rows
    assert (name, length, shares, budget) == ("decode-1/0", "2.00", "80 %, 40 %", "2")
    assert float(rate.replace(" ", "").rstrip("k")) > 0
    await tab.evaluate(f"{row}[0].click()")
    await tab.until("document.querySelector('#drawer-body').textContent.includes('accept length')")


async def test_keys_move_choose_open_filter_and_close(cluster: Cluster, tab: Tab) -> None:
    for number in (1, 2):
        await cluster.add_decode(f"decode-{number}")
    await open_page(tab, cluster, 4)
    await tab.press("ArrowDown")
    await tab.press("ArrowDown")
    await tab.press("ArrowDown")
    assert await tab.evaluate(ACTIVE) == "decode-1/0"
    await tab.press("Enter")
    assert await tab.evaluate("document.querySelector('#drawer').open")
    assert await text_of(tab, "#drawer-title") == "decode-1/0"
    assert "127.0.0.1:" in await text_of(tab, "#drawer-body")
    await tab.press("Escape")
    await tab.until("!document.querySelector('#drawer').open")
    await tab.press("/")
    assert await tab.evaluate("document.activeElement.id") == "filter"
    for key in "prefill":
        await tab.press(key)
    await tab.until(f"{ROWS} === 1")
    await tab.press("Escape")
    await tab.until(f"{ROWS} === 4")
    await tab.press("g")
    await tab.until("!document.querySelector('#grid').hidden")
    await tab.press("?")
    assert await tab.evaluate("document.querySelector('#keys').open")


async def test_the_theme_follows_the_system_until_it_is_chosen(cluster: Cluster, tab: Tab) -> None:
    background = "getComputedStyle(document.documentElement).backgroundColor"
    seen = {}
    for scheme in ("dark", "light"):
        await tab.prefer(scheme)
        await open_page(tab, cluster, 2)
        seen[scheme] = await tab.evaluate(background)
    assert seen["dark"] != seen["light"]
    await tab.press("t")
    assert await tab.evaluate(background) == seen["dark"]
    await open_page(tab, cluster, 2)
    assert await tab.evaluate(background) == seen["dark"], "it is remembered"
    await tab.press("t")
    await tab.press("t")
    assert await tab.evaluate(background) == seen["light"]


async def test_names_and_ids_are_text_and_never_markup(cluster: Cluster, tab: Tab) -> None:
    decode = FakeDecode(HOSTILE, cluster.decode.model, cluster.script)
    cluster.decodes.append(decode)
    await decode.start(cluster.control)
    await open_page(tab, cluster, 3)
    assert HOSTILE in await text_of(tab, "#table")
    await tab.until("document.querySelector('#events ol').textContent.includes('onerror')")
    assert await tab.evaluate("document.querySelectorAll('img').length") == 0


async def test_a_lost_stream_is_said_and_taken_up_again(cluster: Cluster, tab: Tab) -> None:
    await open_page(tab, cluster, 2)
    await tab.call("Network.enable")
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    await tab.call("Network.emulateNetworkConditions", offline=True, **offline)
    await tab.evaluate("source.close()")
    await tab.until("document.body.classList.contains('stale')")
    assert "no word for" in await text_of(tab, "#status")
    await tab.call("Network.emulateNetworkConditions", offline=False, **offline)
    await tab.evaluate("connect()")
    await tab.until("!document.body.classList.contains('stale')")
    assert await text_of(tab, "#status") == "ready"


async def test_a_hundred_workers_are_a_grid_and_nothing_jumps(
    start_router: StartRouter, tab: Tab
) -> None:
    cluster = await start_router(lease_ttl_s=5.0)
    crowd = Crowd(cluster.control, cluster.tokenizer)
    try:
        await crowd.start(20, 80)
        await open_page(tab, cluster, 100)
        assert not await tab.evaluate("document.querySelector('#grid').hidden")
        before = await boxes(tab)
        await tab.until("document.querySelector('#pairs tbody').textContent.includes('B/s')")
        crowd.decodes[7].fall_silent()
        await tab.until("document.querySelectorAll('[data-state=lost].cell').length === 1")
        assert await boxes(tab) == before
        assert "1 in trouble" in await text_of(tab, "#status")
        await tab.press("ArrowRight")
        first = await tab.evaluate(CHOSEN)
        await tab.press("ArrowRight")
        await tab.press("ArrowDown")
        assert await tab.evaluate(CHOSEN) not in ("", first)
        await tab.press("g")
        await tab.until("!document.querySelector('#table').hidden")
        rows = await tab.evaluate("document.querySelectorAll('#table tr[data-name]').length")
        assert rows == 100
        for width in (1920, 1280, 390):
            await tab.resize(width, 844)
            await asyncio.sleep(0.2)
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert await tab.evaluate(overflow) == 0, width
    finally:
        await crowd.close()


async def test_everything_that_can_be_used_has_a_name(cluster: Cluster, tab: Tab) -> None:
    await open_page(tab, cluster, 2)
    tree = await tab.call("Accessibility.getFullAXTree")
    named = {"button", "searchbox", "combobox", "table", "region", "dialog", "list", "img"}
    nameless = [
        node["role"]["value"]
        for node in tree["nodes"]
        if not node.get("ignored")
        and node.get("role", {}).get("value") in named
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []


async def test_a_browser_signs_in_looks_and_signs_out(
    start_router: StartRouter, tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.rpc.renewal.CHECK_S", 0.0)
    key, file = new_key(), tmp_path / "keys.toml"
    record = KeyRecord(name="ops", sha256=hash_key(key), rights=frozenset({Right.OPERATIONS}))
    add_to_file(file, record)
    cluster = await start_router(keys_file=str(file))
    await cluster.add_decode()

    async def sign_in(given: str) -> None:
        await tab.until("document.querySelector('form[action=\"/console/session\"]') !== null")
        await tab.evaluate(
            f"document.querySelector('#key').value = {json.dumps(given)};"
            "document.querySelector('form').requestSubmit()"
        )

    await tab.goto(f"{cluster.url}/console")
    await sign_in("sk-of-nobody")
    await tab.until("document.querySelector('[role=alert]')?.textContent.includes('not known')")
    await sign_in(key)
    await tab.until(f"{ROWS} === 1")
    assert await tab.evaluate("document.cookie") == ""
    assert key not in await tab.evaluate("location.href + JSON.stringify(localStorage)")
    await tab.evaluate("document.querySelector('form[action=\"/console/end\"] button').click()")
    await sign_in(key)
    await tab.until(f"{ROWS} === 1")
    remove_from_file(file, "ops")  # the open page goes back to the form
    await tab.until("document.querySelector('#key') !== null")
    # The browser itself says what was answered 401.
    assert all("401" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


async def test_a_map_shows_who_waits_for_whom_and_what_is_slow(cluster: Cluster, tab: Tab) -> None:
    await open_page(tab, cluster, 2)
    assert await tab.evaluate("document.querySelector('#ranks').hidden")
    (window,) = play(1, 4, Fault(ranks=(2,), attention=1.5), seed=3)
    keys = [WorkerKey("decode-0", cluster.decode.identity.epoch, rank) for rank in range(4)]
    for key in keys:
        blocks = [block_to_proto(block) for block in blocks_of(window, key.rank)]
        cluster.ranks.heard(key, 4, blocks)
    await cluster.add_decode("decode-1")  # whatever changes, the page is told of the ranks, too
    await tab.until("!document.querySelector('#ranks').hidden")
    assert await tab.evaluate("document.querySelectorAll('#heat i').length") == 16
    share = "Number(document.querySelectorAll('#heat i')[{}].style.getPropertyValue('--v'))"
    slow, usual = [await tab.evaluate(share.format(at)) for at in (2, 1)]  # of rank 0
    assert slow > 2 * usual > 0
    assert "1 rank or links slow" in await text_of(tab, "#ranks-note")
    assert "slow_sender: rank 2" in await text_of(tab, "#findings")
    await tab.evaluate(
        "document.querySelectorAll('#heat i')[2].dispatchEvent("
        "new MouseEvent('mouseover', {bubbles: true}))"
    )
    assert "rank 0 waits" in await text_of(tab, "#ranks-at")


SHADES = (
    "[...document.querySelectorAll('#load i')].map((cell) => cell.style.getPropertyValue('--v'))"
)


@contextlib.asynccontextmanager
async def counting_decode(cluster: Cluster, folder: Path) -> AsyncIterator[Rank]:
    """A decode rank in the pool whose experts are dealt to four, and that steps when it is told."""
    placements = ExpertPlacements.alike(range(EXPERTS), EXPERTS, layers=range(1, 3))
    rank = Rank(replace(make_experts(folder), placements=placements, num_ranks=4))
    options: Any = SimpleNamespace(
        role="decode", served_name=MODEL, section=SimpleNamespace(num_endpoints=1)
    )
    decode = FakeDecode("decode-1", MODEL, cluster.script)
    decode.add_experts = partial(
        add_experts, identity=decode.identity, options=options, feed=rank.feed
    )
    cluster.decodes.append(decode)
    await decode.start(cluster.control)
    yield rank


async def test_rows_of_ranks_by_layers_are_recorded_while_somebody_looks(
    cluster: Cluster, tab: Tab, tmp_path: Path
) -> None:
    """Two rows of experts go to rank 1 in the first layer for one that goes to each other rank."""
    await open_page(tab, cluster, 2)
    assert await tab.evaluate("document.querySelector('#experts').hidden")
    async with counting_decode(cluster, tmp_path) as rank:
        await tab.until("!document.querySelector('#experts').hidden")
        assert await tab.evaluate("document.querySelector('#experts-of').value") == "decode-1"
        assert rank.num_followers == 0, "nobody has asked yet"
        await tab.evaluate("LOOK.seconds = 0.3; document.querySelector('#record').click()")
        await tab.until(
            "document.querySelector('#experts-note').textContent.startsWith('no step was made')"
        )
        rows = {
            (1, 0): 2,
            (1, 2): 4,
            (1, 4): 2,
            (1, 6): 2,
            (2, 1): 1,
            (2, 3): 1,
            (2, 5): 1,
            (2, 7): 1,
        }
        await tab.evaluate("LOOK.seconds = 60")
        while await tab.evaluate("document.querySelectorAll('#load i').length") == 0:
            if rank.num_followers:
                rank.step(rows)
            await asyncio.sleep(0.01)
        assert await tab.evaluate(SHADES) == ["0.00"] * 2 + ["1.00"] + ["0.00"] * 5
        assert "4 ranks, 16 steps of 5 tokens; balancedness 0.700" in await text_of(
            tab, "#experts-note"
        )
        await tab.evaluate(
            "document.querySelectorAll('#load i')[2].dispatchEvent("
            "new MouseEvent('mouseover', {bubbles: true}))"
        )
        assert await text_of(tab, "#experts-at") == "layer 1, rank 1: 1.60 times the mean"
        await until(lambda: rank.num_followers > 0)  # the next look, at nothing yet
        for is_hidden in (True, False):
            await tab.evaluate(
                "Object.defineProperty(document, 'hidden',"
                f" {{value: {json.dumps(is_hidden)}, configurable: true}});"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
            await until(lambda is_hidden=is_hidden: is_hidden != (rank.num_followers > 0))
        await tab.evaluate("document.querySelector('#record').click()")
        await until(lambda: rank.num_followers == 0)
        assert await tab.evaluate("document.querySelector('#experts-body').hidden")
        await asyncio.sleep(2.5)
        assert rank.num_followers == 0, "nor is it asked again"
    # The browser itself says what was answered 409.
    assert all("409" in complaint for complaint in tab.complaints)
    tab.complaints.clear()
