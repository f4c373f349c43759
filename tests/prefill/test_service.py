"""Run and Revoke over real gRPC: every call is answered, every ticket is closed."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from prefill.messages import StopLoop
from prefill.rank_plan import Closure, ClosureOutcome
from prefill.worker import PrefillDriver
from runtime.errors import DrainingError, InternalError, LayoutMismatchError
from runtime.metrics.core import render_metrics
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from runtime.trace.context import TraceContext, use_trace
from tests.prefill.fakes import BLOCK_SIZE, FIRST_TOKEN
from tests.prefill.service_bench import (
    IDENTITY,
    SAMPLING,
    Gate,
    ServiceBench,
    code_of,
    message_of,
    revoke,
    service_bench,
)
from tests.waiting import until


@pytest.fixture
async def bench() -> AsyncIterator[ServiceBench]:
    async with service_bench() as served:
        yield served


def metric(registry: CollectorRegistry, name: str, **labels: str) -> float:
    value = registry.get_sample_value(name, labels)
    assert value is not None, render_metrics(registry).decode()
    return value


async def test_the_first_token_comes_while_the_kv_still_moves(bench: ServiceBench) -> None:
    token = await bench.run(1, 10)
    assert isinstance(token, prefill_pb2.FirstToken)
    assert token.token_id == FIRST_TOKEN
    assert token.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    assert token.timings.prefill_queue_s >= 0
    assert bench.decode.closures == []
    await until(lambda: bench.sender.open_tickets == {1: "finishing"})  # right behind it
    await bench.drain_senders()
    (closing,) = bench.decode.closings
    assert (closing.prefill, closing.decode_epoch) == (IDENTITY, 77)
    (closure,) = closing.closures
    assert (closure.request_id, closure.nonce) == ("request-1", 1)
    (part,) = closure.parts
    assert (part.rank, part.outcome) == (0, decode_pb2.TICKET_OUTCOME_SENT)
    assert part.drained
    bench.assert_empty()
    name = "pd_prefill_requests_total"
    assert metric(bench.registry, name, outcome="first_token") == 1
    assert metric(bench.registry, "pd_prefill_ticket_parts_total", outcome="sent") == 1
    assert metric(bench.registry, "pd_prefill_num_requests_sending") == 0
    assert metric(bench.registry, "pd_prefill_queue_seconds_count") == 1
    for name in ("bytes", "descriptors", "post_seconds", "wire_seconds", "exposed_seconds"):
        assert metric(bench.registry, f"pd_kv_transfer_{name}_count", peer="decode-0/0") == 1


async def test_a_first_token_that_ends_the_request_closes_as_not_needed(
    bench: ServiceBench,
) -> None:
    token = await bench.run(1, sampling=sampling_of(max_tokens=1))
    assert isinstance(token, prefill_pb2.FirstToken)
    assert token.finish_reason == common_pb2.FINISH_REASON_LENGTH
    await bench.drain_senders()
    assert bench.outcomes() == [(1, "NOT_NEEDED")]
    assert not bench.decode.parts_of(1)[0].HasField("error")
    bench.assert_empty()


async def test_calls_after_the_first_need_no_endpoint(bench: ServiceBench) -> None:
    await bench.run(1)
    answers = await asyncio.gather(*(bench.run(nonce) for nonce in range(2, 13)))
    assert all(isinstance(answer, prefill_pb2.FirstToken) for answer in answers)
    await bench.drain_senders()
    assert [claim.has_endpoint for claim in bench.decode.claims] == [False] + [True] * 11
    assert sorted(bench.outcomes()) == [(nonce, "SENT") for nonce in range(1, 13)]
    assert len(bench.decode.closings) < 12
    bench.assert_empty()


def sampling_of(**values: object) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(SAMPLING)
    sampling.MergeFrom(common_pb2.SamplingParams(**values))  # type: ignore[arg-type]
    return sampling


BAD_CALLS = {
    "empty prompt": ({"context_token_ids": []}, "INVALID_REQUEST", "prompt is empty"),
    "only output": ({"num_output_tokens": 6}, "INVALID_REQUEST", "prompt is empty"),
    "prompt too long": ({"num_tokens": 64}, "INVALID_REQUEST", "at most 63"),
    "output complete": (
        {"num_tokens": 20, "num_output_tokens": 8},
        "INVALID_REQUEST",
        "num_output_tokens is 8 of max_tokens 8",
    ),
    "unknown token": ({"context_token_ids": [1, 1000]}, "INVALID_REQUEST", "token id 1000"),
    "negative token": ({"context_token_ids": [-1, 1]}, "INVALID_REQUEST", "token id -1"),
    "no sampling": (
        {"sampling": common_pb2.SamplingParams()},
        "INVALID_REQUEST",
        "max_tokens is 0",
    ),
    "temperature": ({"sampling": sampling_of(temperature=-1.0)}, "INVALID_REQUEST", "temperature"),
    "no number": ({"sampling": sampling_of(min_p=math.nan)}, "INVALID_REQUEST", "min_p is nan"),
    "top_k": ({"sampling": sampling_of(top_k=-2)}, "INVALID_REQUEST", "top_k is -2"),
    "prompt logprobs": (
        {"sampling": sampling_of(num_prompt_logprobs=21)},
        "INVALID_REQUEST",
        "num_prompt_logprobs is 21",
    ),
    "too many prompt logprobs": (
        {"num_tokens": 60, "sampling": sampling_of(num_prompt_logprobs=2)},
        "INVALID_REQUEST",
        "num_prompt_logprobs = 2 for 60 tokens is 180 log-probabilities: at most 179",
    ),
    "bad bias": ({"sampling": sampling_of(logit_bias={5000: 1.0})}, "INVALID_REQUEST", "5000"),
    "bad stop": ({"sampling": sampling_of(stop_token_ids=[-3])}, "INVALID_REQUEST", "-3"),
    "logprobs": ({"sampling": sampling_of(num_logprobs=21)}, "INVALID_REQUEST", "-1 to 20"),
    "late": ({"timeout_s": 0.0}, "DEADLINE_EXCEEDED", "was over"),
    "endless": ({"timeout_s": float("inf")}, "INVALID_REQUEST", "timeout_s is inf"),
    "no time": ({"timeout_s": float("nan")}, "INVALID_REQUEST", "timeout_s is nan"),
    "other request": ({"place_request_id": "x"}, "STALE_TICKET", "of request 'x'"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
async def test_a_bad_call_is_refused_before_it_is_queued_and_decode_is_not_asked(
    bench: ServiceBench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill.validation.MAX_PROMPT_LOGPROBS", 179)
    changes, code, text = BAD_CALLS[name]
    answer = await bench.run(1, **changes)  # type: ignore[arg-type]
    assert code_of(answer) == code
    assert text in message_of(answer)
    assert isinstance(answer, common_pb2.Error)
    assert answer.request_id == "request-1"
    await bench.runs.wait_empty()
    assert (bench.decode.claims, bench.decode.closures, bench.runner.steps) == ([], [], [])
    bench.assert_empty()


BAD_TICKETS: dict[str, tuple[dict[str, object], str]] = {
    "too few blocks": ({"block_ids": [1]}, "has 1 blocks"),
    "too many blocks": ({"block_ids": [1, 2, 3]}, "another context"),
    "all cached": ({"num_cached_tokens": 8}, "holds 8 tokens"),
    "odd cache": ({"num_cached_tokens": 3}, "holds 3 tokens"),
    "other request": ({"request_id": "x"}, "of request 'x'"),
    "other nonce": ({"nonce": 9}, "ticket 0000000000000009"),
    "other life": ({"decode": common_pb2.WorkerIdentity(instance="decode-0", epoch=1)}, "epoch 1"),
}


@pytest.mark.parametrize("name", BAD_TICKETS)
async def test_a_ticket_that_is_not_of_the_context_is_closed_and_nothing_computed(
    bench: ServiceBench, name: str
) -> None:
    changes, text = BAD_TICKETS[name]
    bench.decode.ticket_changes = changes
    answer = await bench.run(1)
    assert code_of(answer) == "STALE_TICKET"
    assert text in message_of(answer)
    await bench.runs.wait_empty()
    assert bench.outcomes() == [(1, "FAILED")]
    (part,) = bench.decode.parts_of(1)
    assert (part.error.code, part.drained) == (common_pb2.ERROR_CODE_STALE_TICKET, True)
    assert bench.runner.steps == []
    bench.assert_empty()


async def test_a_call_without_a_reservation_is_refused(bench: ServiceBench) -> None:
    assert code_of(await bench.run(0)) == "INVALID_REQUEST"
    assert bench.decode.claims == []


async def test_a_call_for_a_former_life_is_stale_and_its_revoke_says_so(
    bench: ServiceBench,
) -> None:
    former = common_pb2.WorkerIdentity(instance="prefill-0", epoch=4)
    assert code_of(await bench.run(1, expected=former)) == "STALE_TICKET"
    assert bench.decode.claims == []
    revoked = await bench.stub.Revoke(
        prefill_pb2.RevokeRequest(nonce=1, prefill=former, remember_s=10)
    )
    assert not revoked.drained, "decode has to fence"


async def test_a_replayed_call_is_refused_and_nothing_is_closed_twice(
    bench: ServiceBench,
) -> None:
    await bench.run(1)
    assert code_of(await bench.run(1)) == "STALE_TICKET"
    await bench.drain_senders()
    assert code_of(await bench.run(1)) == "STALE_TICKET"
    assert bench.outcomes() == [(1, "SENT")]
    assert len(bench.runner.steps) == 1


async def test_a_call_that_is_replayed_when_nobody_here_remembers_it_is_refused_by_decode() -> None:
    async with service_bench(num_nonces=1) as bench:
        call = bench.request(1)
        for request in (call, bench.request(2)):
            await bench.stub.Run(request, timeout=60)
            await bench.drain_senders()
        assert bench.nonces.state(1) is None
        response = await bench.stub.Run(call, timeout=60)
        assert code_of(response.error) == "STALE_TICKET"
        await bench.runs.wait_empty()
        assert len(bench.runner.steps) == 2
        assert bench.outcomes() == [(1, "SENT"), (2, "SENT")]
        bench.assert_empty()


async def test_a_prompt_beyond_the_pool_is_refused_and_decode_is_not_asked() -> None:
    async with service_bench(num_blocks=3) as bench:
        answer = await bench.run(1, 3 * BLOCK_SIZE)
        assert code_of(answer) == "OUT_OF_BLOCKS"
        await bench.runs.wait_empty()
        assert bench.decode.claims == []
        bench.assert_empty()


async def test_the_deadline_covers_the_queue(bench: ServiceBench) -> None:
    bench.runner.before_step = gate = Gate()
    first = asyncio.create_task(bench.run(1))
    await until(gate.reached.is_set)
    late = asyncio.create_task(bench.run(2, timeout_s=0.05))
    await until(lambda: late.done() or bench.runs.get(2))
    await asyncio.sleep(0.1)
    gate.opened.set()
    assert code_of(await late) == "DEADLINE_EXCEEDED"
    assert isinstance(await first, prefill_pb2.FirstToken)
    await bench.drain_senders()
    assert bench.outcomes() == [(1, "SENT")]
    bench.assert_empty()


async def test_cancelling_the_call_while_it_waits(bench: ServiceBench) -> None:
    bench.runner.before_step = gate = Gate()
    first = asyncio.create_task(bench.run(1))
    await until(gate.reached.is_set)
    call = bench.stub.Run(bench.request(2))
    await until(lambda: bench.runs.get(2))
    call.cancel()
    await until(lambda: (run := bench.runs.get(2)) and run.answer.cancelled())
    gate.opened.set()
    await first
    await bench.drain_senders()
    assert bench.outcomes() == [(1, "SENT")]
    assert [claim.nonce for claim in bench.decode.claims] == [1]
    assert len(bench.runner.steps) == 1
    bench.assert_empty()


async def test_cancelling_the_call_while_it_runs_waits_for_the_senders() -> None:
    async with service_bench(max_num_batched_tokens=4) as bench:
        bench.runner.before_step = gate = Gate()
        call = bench.stub.Run(bench.request(1, 12))
        await until(gate.reached.is_set)
        call.cancel()
        await until(lambda: (run := bench.runs.get(1)) and run.answer.cancelled())
        gate.opened.set()
        await until(lambda: bench.sender.open_tickets.get(1) == "abandoned")
        assert len(bench.runs) == 1
        await bench.drain_senders()
        assert bench.outcomes() == [(1, "ABANDONED")]
        assert len(bench.runner.steps) == 1
        bench.assert_empty()


async def test_revoking_what_was_never_seen_makes_it_stale(bench: ServiceBench) -> None:
    assert await revoke(bench, 1)
    answer = await bench.run(1)
    assert code_of(answer) == "STALE_TICKET"
    assert "revoked" in message_of(answer)


async def test_revoking_a_request_that_is_being_sent_answers_when_it_is_drained(
    bench: ServiceBench,
) -> None:
    await bench.run(1)
    call = asyncio.create_task(revoke(bench, 1))
    await until(lambda: bench.sender.open_tickets[1] == "abandoned")
    assert not call.done()
    await bench.drain_senders()
    assert await call
    assert bench.outcomes() == [(1, "ABANDONED")]
    bench.assert_empty()


async def test_revoking_at_another_life_says_that_it_cannot_know(bench: ServiceBench) -> None:
    former = common_pb2.WorkerIdentity(instance="prefill-0", epoch=4)
    response = await bench.stub.Revoke(prefill_pb2.RevokeRequest(nonce=1, prefill=former))
    assert not response.drained


async def test_when_the_engine_loop_dies_nobody_hangs(bench: ServiceBench) -> None:
    bench.runner.before_step = gate = Gate()
    bench.runner.failure = RuntimeError("device lost")
    first = asyncio.create_task(bench.run(1))
    await until(gate.reached.is_set)
    late = [asyncio.create_task(bench.run(nonce)) for nonce in (2, 3)]
    await until(lambda: len(bench.runs) == 3)
    gate.opened.set()
    for answer in await asyncio.gather(first, *late):
        assert code_of(answer) == "INTERNAL"
        assert message_of(answer) == "prefill rank 0 of 1 failed: RuntimeError: device lost"
    ended = await bench.runs.loop_ended
    assert type(ended.error) is InternalError
    after = await bench.run(4)
    assert code_of(after) == "DRAINING", "another worker may serve it"
    assert message_of(after) == "prefill rank 0 of 1 has ended: use another one"
    bench.runs.close_left(0, LayoutMismatchError("over"))
    await bench.runs.wait_empty()
    assert bench.outcomes() == [(1, "FAILED")], "of the others decode was never asked"


async def test_what_a_sender_could_not_complete_after_the_end_is_not_called_drained(
    bench: ServiceBench,
) -> None:
    """The engine loop has ended, so only the sender's own word says that decode has to fence."""
    bench.runner.before_step = gate = Gate()
    first = asyncio.create_task(bench.run(1))
    await until(gate.reached.is_set)
    second = asyncio.create_task(bench.run(2))
    await until(lambda: len(bench.runs) == 2)
    bench.loop.submit(StopLoop())
    gate.opened.set()
    await asyncio.gather(first, second)
    await bench.runs.loop_ended
    assert 1 in bench.sender.open_tickets
    driver = PrefillDriver(None)  # type: ignore[arg-type]
    driver._runs, driver._loop = bench.runs, bench.loop
    driver._event_loop = asyncio.get_running_loop()
    for nonce in bench.sender.open_tickets:
        driver._ticket_closed(
            Closure(nonce=nonce, outcome=ClosureOutcome.FAILED, drained=nonce != 1)
        )
    await asyncio.sleep(0)  # what the sender says comes to the event loop from its thread
    bench.runs.close_left(0, DrainingError("over"))
    await bench.runs.wait_empty()
    parts = {closure.nonce: closure.parts[0] for closure in bench.decode.closures}
    assert parts[1].outcome == decode_pb2.TICKET_OUTCOME_FAILED
    assert not parts[1].drained, "decode frees blocks that are drained at once"
    assert all(part.drained for nonce, part in parts.items() if nonce != 1)
    revoked = await bench.stub.Revoke(prefill_pb2.RevokeRequest(nonce=1, prefill=IDENTITY))
    assert not revoked.drained


async def test_what_is_left_at_an_orderly_end_may_go_elsewhere() -> None:
    async with service_bench(max_num_batched_tokens=8) as bench:
        bench.runner.before_step = gate = Gate()
        running = asyncio.create_task(bench.run(1, 20))
        await until(gate.reached.is_set)
        # In the middle of one prompt, before it looks at the other.
        bench.loop.submit(StopLoop())
        waiting = asyncio.create_task(bench.run(2))
        await until(lambda: len(bench.runs) == 2)
        gate.opened.set()
        for answer in await asyncio.gather(running, waiting):
            assert code_of(answer) == "DRAINING"
            assert message_of(answer).startswith("prefill rank 0 of 1 was told to stop")
        after = await bench.run(3)
        assert code_of(after) == "DRAINING"
        assert message_of(after) == "prefill rank 0 of 1 has ended: use another one"


async def test_a_claim_is_of_the_trace_of_its_run_and_a_closing_of_none(
    bench: ServiceBench,
) -> None:
    trace = TraceContext.begin()
    with use_trace(trace):
        assert isinstance(await bench.run(1), prefill_pb2.FirstToken)
    await bench.drain_senders()
    assert bench.decode.traces == [("Claim", trace.trace_id), ("CloseTickets", "")]
