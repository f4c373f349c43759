"""What the spans of a request say of its attempts, from the moments that its choice has kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from router.http.openai.response import Choice, Prompt, ResponseInfo
from router.http.request_spans import record_request
from router.pool.members import WorkerKey
from router.requests.generation import Generation, Mailbox
from runtime.sampling import SamplingParams
from runtime.trace.context import TraceContext
from runtime.trace.spans import Span, Spans

P0, D0, D1 = WorkerKey("p0", 1, 0), WorkerKey("d0", 2, 0), WorkerKey("d1", 3, 0)
BEGUN = 100.0


def generation() -> Generation:
    """Received at `BEGUN`, with one attempt that has begun."""
    one = Generation(
        request_id="req-1",
        index=0,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=8),
        cache_salt="",
        mailbox=Mailbox(),
        received=BEGUN,
    )
    begin(one, "req-1", D0, BEGUN + 1)
    return one


def begin(one: Generation, request_id: str, decode: WorkerKey, now: float) -> None:
    """What an attempt notes of itself at its start."""
    one.workers, one.worker_request_id = (P0, decode), request_id
    one.timings.attempt_started = now
    if not one.num_tokens:
        one.timings.reserve_sent = one.timings.run_sent = now


def hand_over(one: Generation, count: int, now: float) -> None:
    """Tokens for the client."""
    one.timings.first_token = one.timings.first_token or now
    one.timings.last_token = now
    one.output_token_ids += range(count)


def recorded(one: Generation, *, finished: bool = True) -> dict[str, list[Span]]:
    """The spans at the request's end, by name."""
    sent: list[Span] = []
    spans = Spans(lambda batch: sent.extend(batch) is None, CollectorRegistry())
    text: Any = SimpleNamespace(finished=finished)
    info: Any = SimpleNamespace(
        response_id="cmpl-1",
        model="m",
        choices=[Choice(index=0, prompt=Prompt(token_ids=[1, 2, 3]), generation=one, text=text)],
    )
    asked: ResponseInfo = info
    record_request(spans, TraceContext.begin(1.0), asked, BEGUN + 10)
    spans.close()
    found: dict[str, list[Span]] = {}
    for span in sent:
        found.setdefault(span.name, []).append(span)
    return found


def named(span: Span) -> tuple[object, object]:
    return span.attributes["tandem.prefill"], span.attributes["tandem.decode"]


async def test_a_request_that_stays_has_no_span_of_its_attempt() -> None:
    one = generation()
    hand_over(one, 8, BEGUN + 2)
    spans = recorded(one)
    assert "router.attempt" not in spans
    assert named(spans["router.decode"][0]) == (str(P0), str(D0))


async def test_each_attempt_of_one_that_moves_says_who_served_it_and_why_it_ended() -> None:
    one = generation()
    hand_over(one, 3, BEGUN + 2)
    one.attempt_ended("draining")
    begin(one, "req-1-r1", D1, BEGUN + 4)
    hand_over(one, 5, BEGUN + 6)
    spans = recorded(one)
    first, second = spans["router.attempt"]
    assert (first.error, second.error) == ("draining", "")
    assert (named(first), named(second)) == ((str(P0), str(D0)), (str(P0), str(D1)))
    told = [
        (
            span.attributes["tandem.attempt"],
            span.attributes["tandem.request_id"],
            span.attributes["gen_ai.usage.output_tokens"],
        )
        for span in (first, second)
    ]
    assert told == [(0, "req-1", 3), (1, "req-1-r1", 5)]
    assert (first.start, second.start, second.end) == (BEGUN + 1, BEGUN + 4, BEGUN + 10)
    # The first token came from the first pair, the last one from the second.
    assert named(spans["router.prefill"][0]) == (str(P0), str(D0))
    assert named(spans["router.decode"][0]) == (str(P0), str(D1))


async def test_one_that_moved_before_its_first_token_had_it_from_the_second_pair() -> None:
    one = generation()
    one.attempt_ended("overloaded")
    begin(one, "req-1-r1", D1, BEGUN + 4)
    hand_over(one, 8, BEGUN + 6)
    spans = recorded(one)
    assert named(spans["router.prefill"][0]) == (str(P0), str(D1))
    assert spans["router.attempt"][0].attributes["gen_ai.usage.output_tokens"] == 0


async def test_an_attempt_that_no_other_could_follow_is_there_once() -> None:
    """All tokens were there, and only the word of the end was lost; or no worker was left."""
    one = generation()
    hand_over(one, 8, BEGUN + 2)
    one.attempt_ended("peer_lost")
    (only,) = recorded(one)["router.attempt"]
    assert only.error == "peer_lost"


async def test_the_last_attempt_of_a_request_that_failed_says_so() -> None:
    one = generation()
    one.attempt_ended("peer_lost")
    begin(one, "req-1-r1", D1, BEGUN + 4)
    spans = recorded(one, finished=False)
    assert [span.error for span in spans["router.attempt"]] == ["peer_lost", "not finished"]
