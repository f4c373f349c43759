"""The process that makes grammars: what it refuses, outlives and keeps, and who waits for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from router.errors import RequestError, TooManyRequestsError
from router.text.grammar import compilers, process
from router.text.grammar.compilers import Compilers
from router.text.grammar.forms import by_rules, json_of, matching
from router.text.tokenizer import Tokenizer
from runtime.errors import InternalError
from tests.router.text.payers import Tenant
from tests.waiting import until

SIMPLE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
async def made(model_dir: Path, tokenizer: Tokenizer) -> AsyncIterator[Compilers]:
    made = Compilers(model_dir, len(tokenizer.vocabulary.pieces))
    yield made
    await made.close()


async def refusal(made: Compilers, schema: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await made.compile([json_of(schema, "field")], param="field")
    return caught.value


async def compiled(made: Compilers, pattern: str, tenant: str) -> str:
    (grammar,) = await made.compile([matching(pattern)], param="field", payer=Tenant(tenant))
    return grammar


async def test_nothing_is_started_before_it_is_asked_for(made: Compilers) -> None:
    assert made.process_ids == []
    (grammar,) = await made.compile([json_of(SIMPLE, "field")], param="field")
    assert "rules" in grammar
    assert len(made.process_ids) == 1


async def test_a_process_that_is_warmed_serves_the_first_form(made: Compilers) -> None:
    made.warm()
    await until(lambda: made.process_ids)
    warmed = made.process_ids
    await until(lambda: made._idle)
    await made.compile([matching("[a-z]")], param="field")
    assert made.process_ids == warmed


async def test_what_cannot_be_warmed_is_told_to_the_first_request(tmp_path: Path) -> None:
    made = Compilers(tmp_path / "no model", 100)
    made.warm()
    with pytest.raises(InternalError, match="does not start: it ended with status 1"):
        await made.compile([matching("[a-z]")], param="field")
    await made.close()


async def test_a_process_that_does_not_start_is_told_with_its_end(tmp_path: Path) -> None:
    made = Compilers(tmp_path / "no model", 100)
    with pytest.raises(InternalError, match="does not start: it ended with status 1"):
        await made.compile([matching("[a-z]")], param="field")
    assert made.process_ids == []


async def test_a_process_that_crashes_at_its_start_is_started_once_more(
    made: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = tmp_path / "crashed"
    crash = f"""[ -e {crashed} ] && exec "$@"; touch {crashed}; kill -SEGV $$"""

    def crashing_once(command: Sequence[str]) -> tuple[str, ...]:
        return ("sh", "-c", crash, "sh", *command)

    monkeypatch.setattr(process, "dying_with_us", crashing_once)
    (grammar,) = await made.compile([matching("[a-z]")], param="field")
    assert "rules" in grammar
    assert crashed.exists()


async def test_a_fault_is_told_with_its_place(made: Compilers) -> None:
    schema = {
        "properties": {"a": {"type": "array", "prefixItems": [False], "minItems": 1}},
        "required": ["a"],
    }
    error = await refusal(made, schema)
    assert (error.param, "excludes" in error.message) == ("field", True)
    endless = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    error = await refusal(made, endless)
    assert (error.param, "without end" in error.message) == ("field", True)
    with pytest.raises(RequestError, match='Rule "x" is not defined'):
        await made.compile([by_rules("root ::= x")], param="field")
    with pytest.raises(RequestError, match="field Regex parsing error"):
        await made.compile([matching("(?=a)")], param="field")


HOSTILE = {
    "many strings": {"enum": [f"{number:06d}" * 5 for number in range(7000)]},
    "wide objects": {
        "properties": {f"{n}": {"properties": {f"{m}": {} for m in range(90)}} for n in range(90)}
    },
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_takes_too_long_is_refused_and_the_next_is_served(
    model_dir: Path, tokenizer: Tokenizer, name: str
) -> None:
    made = Compilers(model_dir, len(tokenizer.vocabulary.pieces), cpu_s=0.05)
    try:
        await refusal(made, HOSTILE[name])
        await until(lambda: made._idle)  # it is started again before anybody asks
        process = made.process_ids
        error = await refusal(made, HOSTILE[name])
        assert "0.05 s" in error.message
        assert made.process_ids == process  # it was remembered
        await made.compile([matching("[a-z]")], param="field")
    finally:
        await made.close()


async def test_what_ends_the_process_is_refused_and_the_next_is_served(made: Compilers) -> None:
    with pytest.raises(RequestError, match="field"):
        await made.compile(
            [by_rules("root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000)], param="field"
        )
    await made.compile([matching("[a-z]")], param="field")


async def test_the_event_loop_goes_on_meanwhile(made: Compilers) -> None:
    """By order: the loop has many turns before a grammar is there."""
    schema = {"properties": {f"name{n}": {"enum": [f"{n}", f"{n + 1}"]} for n in range(300)}}
    task = asyncio.create_task(made.compile([json_of(schema, "field")], param="field"))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(await task) == 1
    assert turns > 100


async def test_what_was_made_is_kept_and_made_once(made: Compilers) -> None:
    form = json_of(SIMPLE, "field")
    several = [made.compile([form], param="field") for _ in range(5)]
    first, *others = await asyncio.gather(*several)
    assert all(other is first for other in others)
    os.kill(made.process_ids[0], 9)
    assert await made.compile([form], param="field") is first


async def test_who_leaves_does_not_stop_it_for_others(made: Compilers) -> None:
    form = json_of(SIMPLE, "field")
    leaving = asyncio.create_task(made.compile([form], param="field"))
    staying = asyncio.create_task(made.compile([form], param="field"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying
    assert leaving.cancelled()


async def test_a_process_that_was_killed_is_started_anew(made: Compilers) -> None:
    await made.compile([matching("a")], param="field")
    os.kill(made.process_ids[0], 9)
    assert await made.compile([matching("b")], param="field")


async def test_the_least_used_goes_first(made: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "CACHE_BYTES", 1500)
    kept = await made.compile([matching("a")], param="field")
    await made.compile([matching("b")], param="field")
    assert await made.compile([matching("a")], param="field") is kept
    for pattern in "cdefghijkl":
        await made.compile([matching(pattern)], param="field")
    assert await made.compile([matching("a")], param="field") is not kept


async def test_too_many_at_once_are_asked_to_wait(
    made: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "MAX_WAITING", 4)
    tasks = [asyncio.create_task(compiled(made, pattern, "alice")) for pattern in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequestsError, match="2 grammars wait to be compiled, 2 of them"):
        await compiled(made, "c", "alice")
    tasks += [asyncio.create_task(compiled(made, pattern, "bob")) for pattern in "cd"]
    tasks.append(asyncio.create_task(compiled(made, "a", "alice")))  # as she has asked
    await asyncio.sleep(0)
    assert made.num_pending == 4
    with pytest.raises(TooManyRequestsError, match="4 grammars wait to be compiled, 0 of them"):
        await compiled(made, "e", "carol")
    await asyncio.gather(*tasks)


async def test_a_form_finds_a_process_whatever_another_tenant_has_compiled(
    model_dir: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was ended is not there again before the test ends: nobody else misses it."""
    made = Compilers(model_dir, len(tokenizer.vocabulary.pieces), cpu_s=0.5)
    mallory = Tenant("mallory")
    try:
        made.warm()
        made.warm()
        await until(lambda: len(made._idle) == 2)
        monkeypatch.setattr(process, "dying_with_us", lambda command: ("sleep", "600"))
        many = HOSTILE["many strings"]["enum"]
        hostile = [
            asyncio.create_task(
                made.compile([json_of({"enum": [*many, name]}, "x")], param="x", payer=mallory)
            )
            for name in "abcdef"
        ]
        hostile.append(
            asyncio.create_task(made.compile([matching("[x]")], param="x", payer=mallory))
        )
        await asyncio.sleep(0)
        assert "rules" in await compiled(made, "[a-z]", "alice")
        with pytest.raises(RequestError, match=r"more than 0\.5 s"):
            await hostile[0]
        assert mallory.paid_s == [0.5]
        for pattern in ("a", "b", "[x]"):  # the last as mallory asked before, who waits
            assert "rules" in await compiled(made, pattern, "alice")
        assert not any(task.done() for task in hostile[1:])
    finally:
        await made.close()
        await asyncio.gather(*hostile, return_exceptions=True)


async def test_a_grammar_that_is_too_large_to_send_is_refused(
    made: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "MAX_GRAMMAR_BYTES", 1000)
    assert "1000 is the most" in (await refusal(made, SIMPLE)).message
