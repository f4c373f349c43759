"""Runs with a grammar: they wait for it without holding up others, and are refused by its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runtime.pb import common_pb2, prefill_pb2
from tests.grammar.fakes import FakeCompiler
from tests.prefill.fakes import FIRST_TOKEN
from tests.prefill.service_bench import SAMPLING, ServiceBench, code_of, message_of, service_bench
from tests.waiting import until


@pytest.fixture
def compiler() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
async def bench(compiler: FakeCompiler) -> AsyncIterator[ServiceBench]:
    async with service_bench(compiler=compiler) as served:
        yield served


def constrained(grammar: str, **constraint: Any) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(SAMPLING)
    wanted = common_pb2.OutputConstraint(grammar=grammar, **constraint)
    sampling.constraint.CopyFrom(wanted)
    return sampling


async def test_a_request_waits_for_its_grammar_and_others_do_not(
    bench: ServiceBench, compiler: FakeCompiler
) -> None:
    slow = asyncio.ensure_future(bench.run(1, sampling=constrained(f"slow {FIRST_TOKEN} 8")))
    await until(lambda: compiler.compiled)
    assert isinstance(await bench.run(2), prefill_pb2.FirstToken)
    assert not slow.done()
    compiler.may_end.set()
    token = await slow
    assert isinstance(token, prefill_pb2.FirstToken)
    assert token.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    await bench.drain_senders()
    bench.assert_empty()


async def test_a_first_token_that_nothing_can_follow_ends_the_request(bench: ServiceBench) -> None:
    token = await bench.run(1, sampling=constrained(str(FIRST_TOKEN)))
    assert isinstance(token, prefill_pb2.FirstToken)
    assert token.token_id == FIRST_TOKEN
    assert token.finish_reason == common_pb2.FINISH_REASON_COMPLETE
    await bench.drain_senders()
    assert bench.outcomes() == [(1, "NOT_NEEDED")]


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        (constrained("bad"), "constraint.grammar cannot be compiled: it is bad"),
        (constrained("1", max_tokens_before=4), "constraint.max_tokens_before is 4"),
        (constrained("1", starts_after=[10**6]), "constraint.starts_after has token id 1000000"),
    ],
)
async def test_invalid_values_name_the_field(
    bench: ServiceBench, sampling: common_pb2.SamplingParams, word: str
) -> None:
    answer = await bench.run(1, sampling=sampling)
    assert code_of(answer) == "INVALID_REQUEST"
    assert word in message_of(answer)
    bench.assert_empty()


async def test_an_output_that_is_over_is_not_continued(bench: ServiceBench) -> None:
    answer = await bench.run(
        1, context_token_ids=[1, 2, 3, 4], num_output_tokens=2, sampling=constrained("3 4")
    )
    assert code_of(answer) == "INVALID_REQUEST"
    assert "the request was over" in message_of(answer)
    bench.assert_empty()


async def test_a_call_that_is_cancelled_while_its_grammar_is_compiled_leaves_nothing(
    bench: ServiceBench, compiler: FakeCompiler
) -> None:
    call = bench.stub.Run(bench.request(1, 6, sampling=constrained("slow 1")))
    await until(lambda: compiler.compiled)
    call.cancel()
    await until(lambda: not len(bench.runs))
    compiler.may_end.set()
    bench.assert_empty()


async def test_the_time_of_a_request_ends_while_its_grammar_is_compiled(
    bench: ServiceBench,
) -> None:
    answer = await bench.run(1, sampling=constrained("slow 1"), timeout_s=0.2)
    assert code_of(answer) == "DEADLINE_EXCEEDED"
    assert "waiting for its grammar" in message_of(answer)
    bench.assert_empty()


async def test_a_worker_that_drains_gives_back_who_waits_for_a_grammar(
    bench: ServiceBench, compiler: FakeCompiler
) -> None:
    waiting = asyncio.ensure_future(bench.run(1, sampling=constrained("slow 1")))
    await until(lambda: compiler.compiled)
    bench.service.start_draining()
    compiler.may_end.set()
    assert code_of(await waiting) == "DRAINING"
    bench.assert_empty()
