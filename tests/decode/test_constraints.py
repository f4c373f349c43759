"""Requests with a grammar at decode: they are let in, and start once it is compiled."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from decode.requests import DecodeRequest
from grammar.matcher import Matcher
from runtime.errors import InvalidRequestError
from runtime.pb import common_pb2
from runtime.sampling import FinishReason, OutputConstraint, SamplingParams
from tests.decode.cluster import run_cluster
from tests.decode.test_rank import Bench
from tests.grammar.fakes import VOCAB, ListedGrammar
from worker.lifecycle import DecodeStatus

CONSTRAINT = OutputConstraint(grammar="listed")


def constrain(request: DecodeRequest) -> None:
    request.request.sampling = SamplingParams(max_tokens=16, constraint=CONSTRAINT)


def made(*outputs: tuple[int, ...]) -> Future[Matcher | None]:
    future: Future[Matcher | None] = Future()
    grammar = ListedGrammar(outputs)
    future.set_result(Matcher(CONSTRAINT, grammar, stop_token_ids=(), vocab_size=VOCAB))
    return future


def failed() -> Future[Matcher | None]:
    future: Future[Matcher | None] = Future()
    future.set_exception(InvalidRequestError("constraint.grammar cannot be compiled: why not"))
    return future


def start(bench: Bench, *, constrained: bool) -> DecodeRequest:
    """A request whose KV is here."""
    request = bench.make()
    if constrained:
        constrain(request)
    bench.rank.reserve(request)
    bench.claim(request)
    bench.arrive(request, first_token=5)
    return request


def test_a_request_waits_for_its_grammar_and_younger_ones_pass() -> None:
    bench = Bench()
    waiting, younger = start(bench, constrained=True), start(bench, constrained=False)
    bench.step()
    assert waiting.status is DecodeStatus.WAITING
    assert younger.status is DecodeStatus.RUNNING
    bench.rank.matched(waiting, made((5, 7, 7)))
    bench.step()
    assert waiting.status is DecodeStatus.RUNNING


@pytest.mark.parametrize(
    "status",
    [
        DecodeStatus.RESERVED,
        DecodeStatus.CLAIMED,
        DecodeStatus.WAITING_FOR_KV,
        DecodeStatus.WAITING,
    ],
)
def test_a_grammar_that_cannot_be_compiled_ends_its_request_wherever_it_is(
    status: DecodeStatus,
) -> None:
    bench = Bench()
    request = bench.make()
    constrain(request)
    bench.bring(request, status)
    assert request.status is status
    bench.rank.matched(request, failed())
    assert request.status is DecodeStatus.FINISHED
    reason, code = bench.last_delta()
    assert reason is FinishReason.ERROR
    assert code is InvalidRequestError.code
    bench.rank.check_integrity()
    bench.rank.matched(request, failed())  # once is enough
    assert bench.rank.news.take() == {}


def test_a_grammar_that_comes_after_the_end_of_its_request_changes_nothing() -> None:
    bench = Bench()
    request = start(bench, constrained=True)
    assert bench.rank.live.abort(request.request_id, InvalidRequestError("gone"))
    bench.rank.matched(request, made((1,)))
    bench.check_empty()


def test_a_request_ends_with_the_token_that_nothing_can_follow() -> None:
    bench = Bench()
    request = start(bench, constrained=True)
    bench.rank.matched(request, made((5, 7, 7)))
    matcher = request.request.matcher
    assert matcher is not None
    for index in range(2):
        matcher.follow([5, 7, 7][: index + 2])  # as a step's end tells it
        bench.step()
    assert bench.last_delta() == (FinishReason.COMPLETE, None)
    bench.check_empty()


async def test_a_model_without_a_tokenizer_refuses_grammars_by_its_name() -> None:
    async with run_cluster() as cluster:
        request = cluster.request("a", [1, 2, 3], constraint=OutputConstraint(grammar="{}"))
        reservation = await cluster.place(request)
        (end,) = await cluster.router.end_of("a")
        assert end.error.code == common_pb2.ERROR_CODE_INVALID_REQUEST
        assert "model.path = '/nowhere/imagined': holds no tokenizer.json" in end.error.message
        answer = await cluster.prefill.claim(reservation)
        assert answer.error.code == common_pb2.ERROR_CODE_INVALID_REQUEST
        await cluster.wait_empty()


async def test_a_constraint_that_cannot_be_is_refused_at_once() -> None:
    async with run_cluster() as cluster:
        constraint = OutputConstraint(starts_after=(10**6,), max_tokens_before=1)
        refused = await cluster.refusal(cluster.request("a", [1, 2], constraint=constraint))
        assert refused.code == common_pb2.ERROR_CODE_INVALID_REQUEST
        assert "constraint.starts_after has token id 1000000" in refused.message
        await cluster.wait_empty()
