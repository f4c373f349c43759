"""Run, Revoke and Drain over real gRPC: every call is answered, every ticket is closed."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from prefill.messages import StopLoop
from runtime.errors import InternalError, LayoutMismatchError
from runtime.metrics import render_metrics
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from tests.prefill.fakes import BLOCK_SIZE, FIRST_TOKEN
from tests.prefill.service_bench import IDENTITY, SAMPLING, Gate, ServiceBench, service_bench


@pytest.fixture
async def bench() -> AsyncIterator[ServiceBench]:
    async with service_bench() as served:
        yield served


def code_of(answer: object) -> str:
    assert isinstance(answer, common_pb2.Error), answer
    return common_pb2.ErrorCode.Name(answer.code).removeprefix("ERROR_CODE_")


def message_of(answer: object) -> str:
    assert isinstance(answer, common_pb2.Error), answer
    return answer.message


def num_queued(bench: ServiceBench) -> int:
    """Calls that were handed to the engine loop."""
    live = (bench.runs.get(nonce) for nonce in range(1, 10))
    return sum(run is not None and run.is_queued for run in live)


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
    await bench.until(lambda: bench.sender.open_tickets == {1: "finishing"})  # right behind it
    await bench.drain_senders()
    (closing,) = bench.decode.closures
    assert closing.outcome == decode_pb2.TICKET_OUTCOME_SENT
    assert (closing.request_id, closing.nonce) == ("request-1", 1)
    assert (closing.decode_epoch, closing.drained) == (77, True)
    assert closing.prefill == IDENTITY
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
    assert not bench.decode.closures[0].HasField("error")
    bench.assert_empty()


async def test_many_calls_at_once_share_one_handshake(bench: ServiceBench) -> None:
    answers = await asyncio.gather(*(bench.run(nonce) for nonce in range(1, 13)))
    assert all(isinstance(answer, prefill_pb2.FirstToken) for answer in answers)
    await bench.drain_senders()
    assert len(bench.decode.handshakes) == 1
    assert sorted(bench.outcomes()) == [(nonce, "SENT") for nonce in range(1, 13)]
    bench.assert_empty()


def sampling_of(**values: object) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(SAMPLING)
    sampling.MergeFrom(common_pb2.SamplingParams(**values))  # type: ignore[arg-type]
    return sampling


BAD_CALLS = {
    "empty prompt": ({"prompt_token_ids": []}, "INVALID_REQUEST", "prompt is empty"),
    "prompt too long": ({"num_tokens": 64}, "INVALID_REQUEST", "at most 63"),
    "unknown token": ({"prompt_token_ids": [1, 1000]}, "INVALID_REQUEST", "token id 1000"),
    "negative token": ({"prompt_token_ids": [-1, 1]}, "INVALID_REQUEST", "token id -1"),
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
    "bad bias": ({"sampling": sampling_of(logit_bias={5000: 1.0})}, "INVALID_REQUEST", "5000"),
    "bad stop": ({"sampling": sampling_of(stop_token_ids=[-3])}, "INVALID_REQUEST", "-3"),
    "logprobs": ({"sampling": sampling_of(num_logprobs=21)}, "INVALID_REQUEST", "-1 to 20"),
    "late": ({"timeout_s": 0.0}, "DEADLINE_EXCEEDED", "was over"),
    "late ticket": ({"ticket_timeout_s": -1.0}, "DEADLINE_EXCEEDED", "was over"),
    "layout": ({"ticket_layout_fingerprint": "abc"}, "LAYOUT_MISMATCH", "abc"),
    "other request": ({"ticket_request_id": "x"}, "STALE_TICKET", "of request 'x'"),
    "too few blocks": ({"ticket_block_ids": [1]}, "STALE_TICKET", "has 1 blocks"),
    "too many blocks": ({"ticket_block_ids": [1, 2, 3]}, "STALE_TICKET", "another prompt"),
    "all cached": ({"ticket_num_cached_tokens": 8}, "STALE_TICKET", "holds 8 tokens"),
    "odd cache": ({"ticket_num_cached_tokens": 3}, "STALE_TICKET", "holds 3 tokens"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
async def test_a_bad_call_is_refused_before_it_is_queued_and_its_ticket_closed(
    bench: ServiceBench, name: str
) -> None:
    changes, code, text = BAD_CALLS[name]
    answer = await bench.run(1, **changes)  # type: ignore[arg-type]
    assert code_of(answer) == code
    assert isinstance(answer, common_pb2.Error)
    assert text in answer.message
    assert answer.request_id == "request-1"
    await bench.runs.wait_empty()
    assert bench.outcomes() == [(1, "FAILED")]
    (closing,) = bench.decode.closures
    assert (closing.error.code, closing.drained) == (answer.code, True)
    assert bench.runner.steps == []
    bench.assert_empty()


async def test_a_call_without_a_ticket_is_refused(bench: ServiceBench) -> None:
    assert code_of(await bench.run(0)) == "INVALID_REQUEST"
    assert bench.decode.closures == []


async def test_a_call_for_a_former_life_is_stale_and_decode_has_to_fence(
    bench: ServiceBench,
) -> None:
    former = common_pb2.WorkerIdentity(instance="prefill-0", epoch=4)
    assert code_of(await bench.run(1, expected=former)) == "STALE_TICKET"
    await bench.runs.wait_empty()
    (closing,) = bench.decode.closures
    assert closing.outcome == decode_pb2.TICKET_OUTCOME_FAILED
    assert not closing.drained
    revoked = await bench.stub.Revoke(
        prefill_pb2.RevokeRequest(nonce=1, prefill=IDENTITY, remember_s=10)
    )
    assert not revoked.drained


async def test_a_replayed_ticket_is_refused_and_nothing_is_closed_twice(
    bench: ServiceBench,
) -> None:
    await bench.run(1)
    assert code_of(await bench.run(1)) == "STALE_TICKET"
    await bench.drain_senders()
    assert code_of(await bench.run(1)) == "STALE_TICKET"
    assert bench.outcomes() == [(1, "SENT")]
    assert len(bench.runner.steps) == 1


async def test_a_prompt_beyond_the_pool_fails_the_ticket() -> None:
    async with service_bench(num_blocks=3) as bench:
        answer = await bench.run(1, 3 * BLOCK_SIZE)
        assert code_of(answer) == "OUT_OF_BLOCKS"
        await bench.runs.wait_empty()
        assert bench.outcomes() == [(1, "FAILED")]
        bench.assert_empty()


async def test_a_refused_handshake_is_the_answer(bench: ServiceBench) -> None:
    bench.decode.handshake_error = LayoutMismatchError("num_layers: ours 3, theirs 4")
    assert code_of(await bench.run(1)) == "LAYOUT_MISMATCH"
    await bench.runs.wait_empty()
    assert bench.outcomes() == [(1, "FAILED")]


async def test_a_decode_that_is_gone_is_a_lost_peer(bench: ServiceBench) -> None:
    answer = await bench.run(1, ticket_decode_address="127.0.0.1:1")
    assert code_of(answer) == "PEER_LOST"
    await bench.runs.wait_empty()
    bench.assert_empty()


async def test_the_deadline_covers_the_handshake(bench: ServiceBench) -> None:
    bench.decode.handshake_gate = asyncio.Event()
    assert code_of(await bench.run(1, timeout_s=0.05)) == "DEADLINE_EXCEEDED"
    bench.decode.handshake_gate.set()
    await bench.runs.wait_empty()
    assert bench.outcomes() == [(1, "FAILED")]


async def test_the_deadline_covers_the_queue(bench: ServiceBench) -> None:
    bench.runner.before_step = gate = Gate()
    first = asyncio.create_task(bench.run(1))
    await bench.until(gate.reached.is_set)
    late = asyncio.create_task(bench.run(2, timeout_s=0.05))
    await asyncio.sleep(0.1)
    gate.opened.set()
    assert code_of(await late) == "DEADLINE_EXCEEDED"
    assert isinstance(await first, prefill_pb2.FirstToken)
    await bench.drain_senders()
    assert sorted(bench.outcomes()) == [(1, "SENT"), (2, "FAILED")]
    bench.assert_empty()


async def test_cancelling_the_call_while_it_meets_decode(bench: ServiceBench) -> None:
    bench.decode.handshake_gate = asyncio.Event()
    call = bench.stub.Run(bench.request(1))
    await bench.until(lambda: bench.decode.handshakes)
    call.cancel()
    await bench.until(lambda: bench.decode.closures)
    assert bench.outcomes() == [(1, "ABANDONED")]
    bench.decode.handshake_gate.set()
    bench.assert_empty()


async def test_cancelling_the_call_while_it_waits(bench: ServiceBench) -> None:
    bench.runner.before_step = gate = Gate()
    first = asyncio.create_task(bench.run(1))
    await bench.until(gate.reached.is_set)
    call = bench.stub.Run(bench.request(2))
    await bench.until(lambda: (run := bench.runs.get(2)) and run.is_queued)
    call.cancel()
    await bench.until(lambda: (run := bench.runs.get(2)) and run.answer.cancelled())
    gate.opened.set()
    await first
    await bench.drain_senders()
    assert sorted(bench.outcomes()) == [(1, "SENT"), (2, "ABANDONED")]
    assert len(bench.runner.steps) == 1
    bench.assert_empty()


async def test_cancelling_the_call_while_it_runs_waits_for_the_senders() -> None:
    async with service_bench(max_num_batched_tokens=4) as bench:
        bench.runner.before_step = gate = Gate()
        call = bench.stub.Run(bench.request(1, 12))
        await bench.until(gate.reached.is_set)
        call.cancel()
        await bench.until(lambda: (run := bench.runs.get(1)) and run.answer.cancelled())
        gate.opened.set()
        await bench.until(lambda: bench.sender.open_tickets.get(1) == "abandoned")
        assert len(bench.runs) == 1
        await bench.drain_senders()
        assert bench.outcomes() == [(1, "ABANDONED")]
        assert len(bench.runner.steps) == 1
        bench.assert_empty()


async def revoke(bench: ServiceBench, nonce: int) -> bool:
    response = await bench.stub.Revoke(
        prefill_pb2.RevokeRequest(
            request_id=f"request-{nonce}", nonce=nonce, prefill=IDENTITY, remember_s=30.0
        ),
        timeout=5,
    )
    return bool(response.drained)


async def test_revoking_a_ticket_never_seen_makes_it_stale(bench: ServiceBench) -> None:
    assert await revoke(bench, 1)
    answer = await bench.run(1)
    assert code_of(answer) == "STALE_TICKET"
    assert isinstance(answer, common_pb2.Error)
    assert "revoked" in answer.message


async def test_revoking_a_request_that_is_being_sent_answers_when_it_is_drained(
    bench: ServiceBench,
) -> None:
    await bench.run(1)
    call = asyncio.create_task(revoke(bench, 1))
    await bench.until(lambda: bench.sender.open_tickets[1] == "abandoned")
    assert not call.done()
    await bench.drain_senders()
    assert await call
    assert bench.outcomes() == [(1, "ABANDONED")]
    bench.assert_empty()


async def test_revoking_a_request_that_meets_decode(bench: ServiceBench) -> None:
    bench.decode.handshake_gate = asyncio.Event()
    run = asyncio.create_task(bench.run(1))
    await bench.until(lambda: bench.decode.handshakes)
    call = asyncio.create_task(revoke(bench, 1))
    await bench.until(lambda: (live := bench.runs.get(1)) and live.revoked)
    bench.decode.handshake_gate.set()
    assert await call
    assert code_of(await run) == "CANCELLED"
    assert bench.runner.steps == []
    bench.assert_empty()


async def test_revoking_at_another_life_says_that_it_cannot_know(bench: ServiceBench) -> None:
    former = common_pb2.WorkerIdentity(instance="prefill-0", epoch=4)
    response = await bench.stub.Revoke(prefill_pb2.RevokeRequest(nonce=1, prefill=former))
    assert not response.drained


async def test_draining_refuses_new_calls_and_waits_for_the_rest(bench: ServiceBench) -> None:
    await bench.run(1)
    early = await bench.stub.Drain(prefill_pb2.PrefillDrainRequest(), timeout=0.5)
    assert early.num_requests_left == 1
    assert bench.drains == [1]
    assert code_of(await bench.run(2)) == "DRAINING"
    call = asyncio.ensure_future(bench.stub.Drain(prefill_pb2.PrefillDrainRequest()))
    await asyncio.sleep(0.02)
    assert not call.done()
    await bench.drain_senders()
    assert (await call).num_requests_left == 0
    assert sorted(bench.outcomes()) == [(1, "SENT"), (2, "FAILED")]


async def test_when_the_engine_loop_dies_nobody_hangs(bench: ServiceBench) -> None:
    bench.runner.before_step = gate = Gate()
    bench.runner.failure = RuntimeError("device lost")
    first = asyncio.create_task(bench.run(1))
    await bench.until(gate.reached.is_set)
    late = [asyncio.create_task(bench.run(nonce)) for nonce in (2, 3)]
    await bench.until(lambda: num_queued(bench) == 3)
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
    assert {nonce for nonce, _ in bench.outcomes()} == {1, 2, 3, 4}


async def test_what_is_left_at_an_orderly_end_may_go_elsewhere() -> None:
    async with service_bench(max_num_batched_tokens=8) as bench:
        bench.runner.before_step = gate = Gate()
        running = asyncio.create_task(bench.run(1, 20))
        await bench.until(gate.reached.is_set)
        # In the middle of one prompt, before it looks at the other.
        bench.loop.submit(StopLoop())
        waiting = asyncio.create_task(bench.run(2))
        await bench.until(lambda: num_queued(bench) == 2)
        gate.opened.set()
        for answer in await asyncio.gather(running, waiting):
            assert code_of(answer) == "DRAINING"
            assert message_of(answer).startswith("prefill rank 0 of 1 was told to stop")
        after = await bench.run(3)
        assert code_of(after) == "DRAINING"
        assert message_of(after) == "prefill rank 0 of 1 has ended: use another one"
