"""Whatever breaks, comes twice or comes early: each token is handed over once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.requests.generation import Generation, Mailbox, Output
from router.requests.sink import AttemptSink
from runtime.errors import InternalError, PeerLostError
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from runtime.rpc.wire import error_to_proto
from runtime.sampling import FinishReason, SamplingParams

LOST = PeerLostError("gone")


def generation_of(num_tokens: int, num_logprobs: int = 0) -> Generation:
    return Generation(
        request_id="r",
        index=0,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=num_tokens, num_logprobs=num_logprobs),
        cache_salt="",
        mailbox=Mailbox(),
        received=0.0,
    )


def logprobs_of(tokens: Sequence[int]) -> list[common_pb2.PositionLogprobs]:
    return [common_pb2.PositionLogprobs(logprob=-float(token)) for token in tokens]


class Workers:
    """The pair of one attempt: what it has to say, from the context's end to the last token."""

    def __init__(self, generation: Generation, tokens: Sequence[int]) -> None:
        self.generation = generation
        self.tokens = tokens
        self.begin = generation.num_tokens
        self.sent = self.begin + 1
        """Output index of what decode says next."""
        self.max_sent = self.sent
        self.has_answered = False
        self.has_logprobs = generation.sampling.num_logprobs >= 0
        self.sink = AttemptSink(generation)
        self.sink.is_reserved = True

    def answer(self) -> None:
        """Prefill's token."""
        self.has_answered = True
        is_last = self.begin + 1 == len(self.tokens)
        first = prefill_pb2.FirstToken(
            index=self.begin,
            token_id=self.tokens[self.begin],
            finish_reason=common_pb2.FINISH_REASON_LENGTH if is_last else 0,  # type: ignore[arg-type]
        )
        if self.has_logprobs:
            first.logprobs.CopyFrom(logprobs_of([self.tokens[self.begin]])[0])
        self.sink.on_first(first)

    def say(self, count: int) -> None:
        """Decode's next tokens."""
        end = min(self.sent + count, len(self.tokens))
        token_ids = self.tokens[self.sent : end]
        is_last = end == len(self.tokens)
        if self.has_logprobs or is_last:
            self.sink.on_delta(
                decode_pb2.TokenDelta(
                    request_id="r",
                    start_index=self.sent,
                    token_ids=token_ids,
                    logprobs=logprobs_of(token_ids) if self.has_logprobs else [],
                    finish_reason=common_pb2.FINISH_REASON_LENGTH if is_last else 0,  # type: ignore[arg-type]
                )
            )
        elif len(token_ids) == 1:
            self.sink.on_token(self.sent, token_ids[0], 1.0)
        else:
            self.sink.on_tokens(self.sent, list(token_ids), 1.0, 0)
        self.sent = end
        self.max_sent = max(self.max_sent, end)

    def resume(self, overlap: int) -> None:
        """The stream broke and stands again; some of what arrived comes for the second time."""
        next_index = self.sink.next_index
        if next_index is not None:
            assert next_index <= self.max_sent
            self.sent = max(next_index - overlap, self.begin + 1)


actions = st.lists(
    st.tuples(
        st.sampled_from(["answer", "say", "say", "lose", "resume", "break", "fail"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(st.integers(1, 24), actions, st.booleans())
def test_every_token_once_and_in_order(
    num_tokens: int, steps: list[tuple[str, int]], has_logprobs: bool
) -> None:
    tokens = list(range(100, 100 + num_tokens))

    async def run() -> list[Output]:
        generation = generation_of(num_tokens, 0 if has_logprobs else -1)
        workers = Workers(generation, tokens)
        for step, number in [*steps, ("end", 0)]:
            if workers.sink.ended.done():
                break
            if step == "answer" and not workers.has_answered:
                workers.answer()
            elif step == "say" and workers.sent < num_tokens:
                workers.say(number + 1)
            elif step == "lose":  # said into a stream that is broken already
                workers.sent = min(workers.sent + number, num_tokens)
                workers.resume(0)
            elif step == "resume":
                workers.resume(number)
            elif step in ("break", "fail"):
                if step == "break":
                    workers.sink.on_lost(LOST)
                else:
                    error = error_to_proto(LOST)
                    workers.sink.on_delta(decode_pb2.TokenDelta(request_id="r", error=error))
                with pytest.raises(PeerLostError):
                    await workers.sink.ended
                workers = Workers(generation, tokens)
        if not workers.has_answered and not workers.sink.ended.done():
            workers.answer()
        while not workers.sink.ended.done():
            workers.say(1)
        assert workers.sink.completed
        assert workers.sink.next_index is None
        assert generation.output_token_ids == tokens
        assert generation.context_token_ids == [1, 2, 3, *tokens]
        assert generation.finish_so_far() is FinishReason.LENGTH
        return await generation._mailbox.take()

    outputs = asyncio.run(run())
    assert [token for output in outputs for token in output.token_ids] == tokens
    logprobs = [p.logprob for output in outputs for p in output.logprobs]
    assert logprobs == ([-float(token) for token in tokens] if has_logprobs else [])
    assert [output.first is not None for output in outputs].count(True) == 1
    assert outputs[0].first is not None
    reasons = [output.finish_reason for output in outputs]
    assert reasons == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]


@pytest.mark.parametrize("num_logprobs", [-1, 0])
@pytest.mark.parametrize("num_before", [0, 3])
async def test_a_gap_is_an_error_and_not_wrong_text(num_logprobs: int, num_before: int) -> None:
    workers = Workers(generation_of(9, num_logprobs), list(range(9)))
    workers.answer()
    for _ in range(num_before):
        workers.say(1)
    workers.sent += 1
    workers.say(1)
    expected = f"sent token {num_before + 2} of request r after token {num_before}"
    with pytest.raises(InternalError, match=expected):
        await workers.sink.ended


async def test_a_first_token_of_another_index_is_an_error() -> None:
    generation = generation_of(9)
    generation.output_token_ids += [1, 2]
    sink = AttemptSink(generation)
    sink.on_first(prefill_pb2.FirstToken(token_id=5, index=0))
    with pytest.raises(InternalError, match="sent token 0 of request r instead of 2"):
        await sink.ended
    assert generation.output_token_ids == [1, 2]


async def test_what_decode_said_early_is_not_asked_for_again() -> None:
    workers = Workers(generation_of(9), list(range(9)))
    workers.sink.is_reserved = False
    assert workers.sink.next_index is None  # decode does not know it
    workers.sink.is_reserved = True
    assert workers.sink.next_index == 1
    workers.say(3)
    assert workers.sink.next_index == 4
    workers.say(9)
    assert workers.sink.next_index is None  # only prefill's token is missing
    workers.answer()
    assert workers.sink.completed


async def test_cpu_of_masks_is_counted_once_an_attempt_and_of_all_attempts() -> None:
    generation = generation_of(9)
    for attempt in range(2):
        sink = AttemptSink(generation)
        first = prefill_pb2.FirstToken(token_id=5, index=2 * attempt)
        first.timings.mask_cpu_s = 0.5
        sink.on_first(first)
        for number, cpu_s in enumerate((0.25, 2.0)):  # all of it so far
            index = 2 * attempt + 1 + number
            delta = decode_pb2.TokenDelta(start_index=index, token_ids=[6])
            delta.timings.mask_cpu_s = cpu_s
            sink.on_delta(delta)
        del generation.output_token_ids[-1:]
        sink.on_lost(InternalError("lost"))
        sink.close()
    assert generation.timings.mask_cpu_s == 2 * (0.5 + 2.0)
    assert generation.timings.told()["mask_cpu_s"] == 5.0
