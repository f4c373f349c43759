"""Several models behind one router: the name decides, and nothing of one touches the other."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import openai
import pytest

from router.keys.file import add_to_file
from router.keys.record import KeyRecord, hash_key, new_key
from tests.router.conftest import MODEL, Cluster, StartRouter, write_model
from tests.router.fakes import FakeDecode, FakePrefill
from tests.waiting import until

OTHER, ALIAS = "other", "small"
TEXT = "the lazy dog jumps over the quick brown fox"
BODY = {"prompt": "def fibonacci(n)", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def models_file(tmp_path: Path) -> Path:
    (tmp_path / OTHER).mkdir()
    # Another template, so that prompts tell which model's they are.
    write_model(tmp_path / OTHER, template="<user>{{ messages[0].content }} <user>")
    path = tmp_path / "models.toml"
    path.write_text(f'[models.{OTHER}]\npath = "{OTHER}"\naliases = ["{ALIAS}"]\n')
    return path


async def add_other(cluster: Cluster, suffix: str = "") -> tuple[FakePrefill, FakeDecode]:
    """A worker of each role for the second model, which answers TEXT."""
    tokens = cluster.tokenizer.encode(TEXT, add_special_tokens=False)

    def script(prompt: object) -> list[int]:
        return [*tokens, cluster.eos, *tokens * 50]

    prefill = FakePrefill(f"other-prefill{suffix}", OTHER, script)
    decode = FakeDecode(f"other-decode{suffix}", OTHER, script)
    cluster.prefills.append(prefill)
    cluster.decodes.append(decode)
    await prefill.start(cluster.control)
    await decode.start(cluster.control)
    await until(lambda: decode.num_streams > 0)
    return prefill, decode


@pytest.fixture
async def both(start_router: StartRouter, models_file: Path) -> Cluster:
    cluster = await start_router(models_file=str(models_file))
    await cluster.add_pair()
    await add_other(cluster)
    return cluster


def client_of(cluster: Cluster, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=0)


async def test_the_name_decides_who_answers(both: Cluster) -> None:
    async with client_of(both) as client:
        for name, text, served in (
            (MODEL, both.answer, MODEL),
            (OTHER, TEXT, OTHER),
            (ALIAS, TEXT, OTHER),
        ):
            body = {**BODY, "max_tokens": 200}
            answer = await client.completions.create(model=name, **body)
            assert (answer.choices[0].text, answer.model) == (text, served)
            chat = await client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "hi"}], stream=True
            )
            chunks = [chunk async for chunk in chat]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
            assert {chunk.model for chunk in chunks} == {served}
    first, other = both.prefills
    assert (len(first.seen), len(other.seen)) == (2, 4)
    # Each model's own template wrote its prompt.
    of_first, of_other = (worker.seen[1].context_token_ids for worker in (first, other))
    assert list(of_first) != list(of_other)
    async with aiohttp.ClientSession(both.url) as http:  # a request that names none
        async with http.post("/v1/completions", json=BODY) as response:
            assert (await response.json())["model"] == MODEL
        async with http.post("/tokenize", json={"model": ALIAS, "prompt": "x"}) as response:
            assert response.status == 200


async def test_all_names_are_listed_with_what_they_stand_for(both: Cluster) -> None:
    async with client_of(both) as client:
        cards = {card.id: card async for card in client.models.list()}
        assert {name: card.root for name, card in cards.items()} == {  # type: ignore[attr-defined]
            MODEL: MODEL,
            OTHER: OTHER,
            ALIAS: OTHER,
        }
        assert (await client.models.retrieve(ALIAS)).root == OTHER  # type: ignore[attr-defined]


async def test_a_model_that_is_not_there_is_a_404_that_names_those_that_are(both: Cluster) -> None:
    async with client_of(both) as client:
        for name in ("gpt-4", f"{OTHER}x"):
            with pytest.raises(openai.NotFoundError) as caught:
                await client.completions.create(model=name, **BODY)
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
            assert all(repr(known) in caught.value.message for known in (MODEL, OTHER, ALIAS))
        with pytest.raises(openai.NotFoundError, match=r"LoRA.*model = 'other'"):
            await client.completions.create(model=f"{OTHER}:sql-adapter", **BODY)
        for field in ("lora_path", "lora_request", "lora_name"):
            with pytest.raises(openai.BadRequestError, match=field):
                await client.completions.create(model=OTHER, **BODY, extra_body={field: "x"})
    assert not any(worker.seen for worker in both.prefills)


async def test_a_key_sees_and_uses_its_models(
    start_router: StartRouter, models_file: Path, tmp_path: Path
) -> None:
    keys_file, keys = tmp_path / "keys.toml", {}
    for name, models in (("by-name", (OTHER,)), ("by-alias", (ALIAS,))):
        keys[name] = new_key()
        record = KeyRecord(name=name, sha256=hash_key(keys[name]), models=models)
        add_to_file(keys_file, record)
    cluster = await start_router(models_file=str(models_file), keys_file=str(keys_file))
    await cluster.add_prefill()
    await cluster.add_decode()
    await add_other(cluster)
    for key in keys.values():
        async with client_of(cluster, key) as client:
            assert [card.id async for card in client.models.list()] == [OTHER, ALIAS]
            for name in (OTHER, ALIAS):
                await client.completions.create(model=name, **BODY)
            with pytest.raises(openai.PermissionDeniedError):
                await client.completions.create(model=MODEL, **BODY)
            with pytest.raises(openai.NotFoundError) as caught:
                await client.completions.create(model="gpt-4", **BODY)
            assert MODEL not in caught.value.message


async def test_a_model_without_workers_is_503_for_it_alone(both: Cluster) -> None:
    other_prefill = both.prefills[1]
    await other_prefill.close()
    both.prefills.remove(other_prefill)
    async with aiohttp.ClientSession(both.url) as http:

        async def ready(query: str) -> int:
            async with http.get(f"/ready{query}") as response:
                return response.status

        async with client_of(both) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model=OTHER, **BODY)
            assert caught.value.status_code == 503
            assert "prefill" in caught.value.message
            answer = await client.completions.create(model=MODEL, **BODY)
            assert answer.choices[0].text == both.text_of(4)
        assert [await ready(q) for q in ("", f"?model={MODEL}", f"?model={OTHER}")] == [
            200,
            200,
            503,
        ]
        assert await ready("?model=gpt-4") == 404
        async with http.get("/status") as response:
            status = await response.json()
    assert status["ready"]
    assert [(m["name"], m["ready"]) for m in status["models"]] == [(MODEL, True), (OTHER, False)]
    assert status["models"][1]["missing"] == ["no prefill worker is ready"]
    assert {row["model"] for row in status["workers"]} == {MODEL, OTHER}
    await add_other(both, "-2")
    async with client_of(both) as client:
        answer = await client.completions.create(model=OTHER, **BODY)
        assert TEXT.startswith(answer.choices[0].text)


async def test_workers_of_two_models_are_never_a_pair(
    start_router: StartRouter, models_file: Path
) -> None:
    cluster = await start_router(models_file=str(models_file), worker_wait_s=0.0)
    await cluster.add_prefill()  # of the one
    _, decode = await add_other(cluster)
    cluster.decodes.remove(decode)
    await decode.close()
    lone = FakeDecode("lone-decode", OTHER, cluster.script)
    cluster.decodes.append(lone)
    await cluster.prefills[1].close()
    cluster.prefills.pop()
    await lone.start(cluster.control)
    await until(lambda: lone.num_streams > 0)
    async with aiohttp.ClientSession(cluster.url) as http:
        async with http.get("/ready") as response:
            assert response.status == 503
            missing = (await response.json())["missing"]
        assert missing == [
            f"{MODEL}: no decode worker is ready",
            f"{OTHER}: no prefill worker is ready",
        ]
        for name in (MODEL, OTHER):
            async with http.post("/v1/completions", json={**BODY, "model": name}) as response:
                assert response.status == 503


async def test_a_full_model_does_not_hold_up_the_other(
    start_router: StartRouter, models_file: Path
) -> None:
    cluster = await start_router(models_file=str(models_file), max_concurrent_requests=1)
    await cluster.add_prefill()
    await cluster.add_decode()
    prefill, _ = await add_other(cluster)
    prefill.holds_runs = True
    async with client_of(cluster) as client:
        waiting = [
            asyncio.create_task(client.completions.create(model=OTHER, **BODY)) for _ in range(2)
        ]
        await until(lambda: len(prefill.seen) == 1)
        answer = await client.completions.create(model=MODEL, **BODY)
        assert answer.choices[0].text == cluster.text_of(4)
        assert len(prefill.seen) == 1
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_metrics_are_told_by_model(both: Cluster) -> None:
    async with client_of(both) as client:
        for name in (MODEL, ALIAS, OTHER):
            await client.completions.create(model=name, **BODY)
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt-4", **BODY)
    async with aiohttp.ClientSession(both.url) as http, http.get("/metrics") as response:
        text = await response.text()

    def value(name: str, label: str, model: str) -> float:
        lines = re.findall(rf'^{name}{{[^}}]*{label}="{model}"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return sum(map(float, lines))

    for model, number in ((MODEL, 1), (OTHER, 2)):
        assert value("pd_ttft_seconds_count", "model", model) == number
        assert value("pd_router_requests_total", "model", model) == number
        assert value("pd_router_tokens_total", "model", model) > number
        assert value("pd_router_workers", "model", model) == 2
        assert value("vllm:e2e_request_latency_seconds_count", "model_name", model) == number
        assert value("pd_process_info", "model", model) == 1
    assert value("pd_router_requests_total", "model", "") == 1
    assert value("pd_router_requests_total", "model", ALIAS) == 0


async def test_a_worker_that_is_called_like_one_of_another_model_is_refused(both: Cluster) -> None:
    worker = FakePrefill("prefill-0", OTHER, both.script)
    try:
        with pytest.raises(Exception, match="is a worker of the model 'org/tiny-model'"):
            await worker.start(both.control)
    finally:
        await worker.close()
    stranger = FakePrefill("stranger", "third", both.script)
    try:
        with pytest.raises(Exception, match=r"router\.models_file"):
            await stranger.start(both.control)
    finally:
        await stranger.close()
