"""Drafts of a choice: counted once each, whichever way they come and however often."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.frames import Delta, fill_frame
from router.requests.drafts import DraftCounts
from router.requests.generation import Generation, Mailbox
from router.requests.rows import RowSinks
from router.requests.sink import AttemptSink
from runtime.errors import DrainingError, InternalError
from runtime.pb import decode_pb2, prefill_pb2
from runtime.sampling import FinishReason, SamplingParams
from tests.router.conftest import MODEL, Cluster
from tests.router.fakes import FakeDecode, Reserved
from tests.waiting import until

if TYPE_CHECKING:
    import openai

# Of a step: drafts that it verified, and those that were right.
STEP = st.integers(0, 3).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


def deltas_of(steps: list[tuple[int, int]], *, has_rows: bool) -> list[Delta]:
    """What decode says, behind prefill's token."""
    deltas, index = [], 1
    for place, (num_drafts, num_right) in enumerate(steps):
        is_last = place == len(steps) - 1
        delta = Delta(
            request_id="r",
            row_id=int(has_rows),
            start_index=index,
            token_ids=tuple(range(index, index + 1 + num_right)),
            num_drafts=num_drafts,
            finish_reason=FinishReason.LENGTH if is_last else None,
        )
        deltas.append(delta)
        index = delta.end_index
    return deltas


@given(
    st.lists(STEP, min_size=1, max_size=12),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4),
)
def test_each_step_counts_once_however_often_it_comes(
    steps: list[tuple[int, int]], has_rows: bool, resumptions: list[tuple[int, int]]
) -> None:
    """Up to a place, then again from one before it; each time in one frame."""
    deltas = deltas_of(steps, has_rows=has_rows)

    async def run() -> Generation:
        params = SamplingParams(max_tokens=deltas[-1].end_index, num_logprobs=-1)
        generation = Generation(
            request_id="r",
            index=0,
            prompt_token_ids=[1],
            sampling=params,
            cache_salt="",
            mailbox=Mailbox(),
            received=0.0,
        )
        sink = AttemptSink(generation)
        sink.is_reserved = True

        def fail(request_id: str, error: Exception) -> None:
            raise error

        sinks = RowSinks(iter([1]), asyncio.get_running_loop().time, fail)
        sinks.attach("r", sink)
        sink.on_first(prefill_pb2.FirstToken(index=0, token_id=0))
        ends = [end for end, _ in resumptions] + [len(deltas)]
        begins = [0] + [begin for _, begin in resumptions]
        reached = 0
        for begin, end in zip(begins, ends, strict=True):
            frame = decode_pb2.Frame()
            fill_frame(frame, deltas[min(begin, reached) : end])
            reached = max(reached, end)
            sinks.deliver(frame.rows)
            for delta in frame.deltas:
                sink.on_delta(delta)
        counts = DraftCounts()
        for output in await generation._mailbox.take():
            if output.num_drafts:
                counts.add(output.num_drafts, len(output.token_ids) - 1)
        generation.drafts = counts
        return generation

    generation = asyncio.run(run())
    assert generation.output_token_ids == list(range(deltas[-1].end_index))
    verifying = [(drafts, right) for drafts, right in steps if drafts]
    assert generation.drafts == DraftCounts(
        num_verifications=len(verifying),
        num_verified=sum(drafts for drafts, _ in verifying),
        num_accepted=sum(right for _, right in verifying),
    )


def test_columns_of_other_lengths_are_refused() -> None:
    rows = decode_pb2.TokenRows(
        row_ids=[1, 2], start_indexes=[1, 1], token_ids=[5, 6], num_drafts=[1]
    )
    sinks = RowSinks(iter([1]), lambda: 0.0, lambda request_id, error: None)
    with pytest.raises(InternalError, match="1 numbers of drafts"):
        sinks.deliver(rows)


def counted(cluster: Cluster, end: int = 1000) -> tuple[int, int]:
    """Drafts that were right in what the decode ranks have said, before an output index; others."""
    accepted = rejected = 0
    for decode in cluster.decodes:
        for reserved in decode.finished.values():
            for delta in reserved.sent:
                right = max(0, min(len(delta.token_ids), end - delta.start_index) - 1)
                accepted += right
                rejected += delta.num_drafts - right
    return accepted, rejected


def told(usage: openai.types.CompletionUsage) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


async def ask(client: openai.AsyncOpenAI, **options: object):
    body = {"model": MODEL, "prompt": "def fib", "max_tokens": 200, **options}
    return await client.completions.create(**body)


async def test_without_drafts_usage_says_none(client, cluster: Cluster) -> None:
    assert told((await ask(client)).usage) == (0, 0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("sends_rows", [True, False])
async def test_usage_of_all_choices(client, cluster: Cluster, n: int, sends_rows: bool) -> None:
    cluster.decode.num_drafts, cluster.decode.sends_rows = 2, sends_rows
    answer = await ask(client, n=n)
    accepted, rejected = counted(cluster)
    assert accepted > n * 4
    assert told(answer.usage) == (accepted, rejected)
    num_steps = sum(len(reserved.sent) for reserved in cluster.decode.finished.values())
    assert answer.usage.completion_tokens == n + num_steps + accepted


@pytest.mark.parametrize("every_chunk", [True, False])
async def test_usage_of_a_stream(client, cluster: Cluster, every_chunk: bool) -> None:
    cluster.decode.num_drafts = 3
    options = {"include_usage": True, "continuous_usage_stats": every_chunk}
    chunks = [chunk async for chunk in await ask(client, stream=True, stream_options=options)]
    assert told(chunks[-1].usage) == counted(cluster)
    if every_chunk:
        counts = [told(chunk.usage) for chunk in chunks]
        assert all(sum(before) <= sum(after) for before, after in pairwise(counts))


async def test_what_stands_behind_a_stop_string_is_no_output(client, cluster: Cluster) -> None:
    """The step that has it verified drafts whose tokens nobody gets; later steps do not count."""
    cluster.decode.num_drafts = 3
    answer = await ask(client, stop="return")
    num_tokens = answer.usage.completion_tokens
    assert answer.choices[0].finish_reason == "stop"
    assert told(answer.usage)[0] == counted(cluster, num_tokens)[0]
    assert sum(told(answer.usage)) % 3 == 0


@pytest.mark.parametrize("how", ["cut", "fail"])
async def test_attempts_and_streams_that_broke_are_added_up(
    client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    said: list[decode_pb2.TokenDelta] = []
    say = FakeDecode._say

    def record(decode: FakeDecode, reserved: Reserved, deltas: list[decode_pb2.TokenDelta]) -> None:
        said.extend(delta for delta in deltas if delta.token_ids)
        say(decode, reserved, deltas)

    monkeypatch.setattr(FakeDecode, "_say", record)
    await cluster.add_decode("decode-1")
    await until(lambda: all(decode.num_streams for decode in cluster.decodes))
    for decode in cluster.decodes:
        decode.num_drafts = 2
        decode.cut_after = 10 if how == "cut" else 0
        decode.fail_after = 10 if how == "fail" else 0
        decode.fail_error = DrainingError("later")
    answer = await ask(client)
    if how == "cut":  # between two steps, of which the first is lost on its way
        ended = [one for decode in cluster.decodes for one in decode.finished.values()]
        said += [delta for one in ended for delta in one.sent if delta not in said]
    accepted = sum(len(delta.token_ids) - 1 for delta in said)
    rejected = sum(delta.num_drafts for delta in said) - accepted
    assert told(answer.usage) == (accepted, rejected)
    num_prefilled = len(cluster.prefill.seen)
    assert num_prefilled == (1 if how == "cut" else 2)
    assert answer.usage.completion_tokens == num_prefilled + len(said) + accepted


async def test_timings_tell_the_accept_length(client, cluster: Cluster) -> None:
    cluster.decode.num_drafts = 2
    answer = await ask(client, extra_body={"timings": True})
    accepted, rejected = counted(cluster)
    length = 1 + accepted / ((accepted + rejected) / 2)
    assert answer.timings["accept_length"] == pytest.approx(length, abs=1e-4)
    cluster.decode.num_drafts = 0
    assert "accept_length" not in (await ask(client, extra_body={"timings": True})).timings
