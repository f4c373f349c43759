"""A step of prefill that fails: who is answered, what returns, and that the rest goes on."""

from __future__ import annotations

import pytest

from engine.step_error import StepError
from prefill.messages import FirstTokenSampled, RequestFailed
from runtime.errors import InternalError
from tests.prefill.fakes import make_item
from tests.prefill.test_loop import Bench

WHERE = ("unprepared", "unlaunched", "unread")


@pytest.mark.parametrize("max_ahead", [0, 1])
@pytest.mark.parametrize("where", WHERE)
def test_a_step_that_fails_ends_its_requests_and_the_rest_goes_on(
    where: str, max_ahead: int
) -> None:
    bench = Bench(max_num_batched_tokens=8, max_ahead=max_ahead)
    errors = getattr(bench.runner, where)
    errors += [None, StepError("no room", has_joined=where != "unprepared")]
    items = [bench.add(make_item(nonce, 8)) for nonce in (1, 2, 3)]
    bench.turn(steps=5)
    (failure,) = bench.of_type(RequestFailed)
    assert isinstance(failure, RequestFailed)
    assert (failure.nonce, failure.error.request_id) == (2, "request-2")
    assert type(failure.error) is InternalError
    assert failure.error.message == "its step failed: no room"
    firsts = [event.nonce for event in bench.of_type(FirstTokenSampled)]  # type: ignore[union-attr]
    assert firsts == [1, 3]
    assert bench.pool.count_prefix(items[1].request.block_hashes) == 0
    bench.drain()
    bench.assert_over(num_requests=3)
    assert not errors


def test_a_request_that_is_at_fault_ends_and_those_beside_it_are_computed() -> None:
    bench = Bench(max_num_batched_tokens=32)
    bench.runner.unprepared = [StepError("a bad token", request_id="request-2", has_joined=False)]
    for nonce in (1, 2, 3):
        bench.add(make_item(nonce, 6))
    bench.turn(steps=3)
    (failure,) = bench.of_type(RequestFailed)
    assert isinstance(failure, RequestFailed)
    assert failure.error.message == "its step failed: a bad token"
    assert bench.runner.steps == [[("request-1", 0, 6), ("request-3", 0, 6)]]
    assert len(bench.of_type(FirstTokenSampled)) == 2
    bench.drain()
    bench.assert_over(num_requests=3)


def test_a_chunk_that_fails_ends_a_request_of_which_another_step_is_under_way() -> None:
    bench = Bench(max_num_batched_tokens=8, max_ahead=1)
    bench.runner.unlaunched = [None, StepError("no room", has_joined=True)]
    item = bench.add(make_item(1, 20))
    bench.turn(steps=4)
    assert item.request.num_launched_tokens == 0
    bench.drain()
    bench.assert_over()
    assert len(bench.of_type(RequestFailed)) == 1
