"""A stream says the same, byte for byte, whichever way its tokens take through the router."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.wire import flow
from router.http.wire.sse import TextEvent
from router.text.output import ChoiceText, OutputOptions
from router.text.tokenizer import Tokenizer
from tests.router.conftest import ANSWER, MODEL, Cluster, train_tokenizer

TEXT = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 100}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "x"}],
    "stream": True,
    "max_tokens": 100,
}
CASES = {
    "completion": ("/v1/completions", TEXT),
    "chat": ("/v1/chat/completions", CHAT),
    "choices": ("/v1/completions", {**TEXT, "n": 3}),
    "usage": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "running usage": (
        "/v1/completions",
        {**TEXT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "stop": ("/v1/completions", {**TEXT, "stop": ["END"]}),
    "logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "ids": ("/v1/completions", {**TEXT, "return_token_ids": True}),
    "special": ("/v1/completions", {**TEXT, "skip_special_tokens": False, "ignore_eos": True}),
}


async def events_of(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[bytes]:
    """By choice: those of several are told in any order."""
    async with http.post(path, json=body) as response:
        assert response.status == 200
        raw = await response.read()
    raw = re.sub(rb'"id":"[^"]+"', b'"id":""', re.sub(rb'"created":\d+', b'"created":0', raw))

    def choice_of(event: bytes) -> int:
        if event.startswith(b"data: {") and (choices := orjson.loads(event[6:])["choices"]):
            return int(choices[0]["index"])
        return 1 << 30

    return sorted(raw.split(b"\n\n"), key=choice_of)


@pytest.mark.parametrize("case", CASES)
async def test_events_are_the_same_by_every_way(
    http: aiohttp.ClientSession, cluster: Cluster, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = CASES[case]
    cluster.answer = f'{ANSWER} "quoted" \\ \u2028 \n\t\x01 \U0001f642\U0001f642'
    answers = [await events_of(http, path, body)]
    cluster.decode.sends_rows = False
    answers.append(await events_of(http, path, body))
    cluster.decode.burst = True
    answers.append(await events_of(http, path, body))
    cluster.decode.sends_rows = True
    answers.append(await events_of(http, path, body))
    monkeypatch.setattr(flow.TextFlow, "take", lambda *_: False)
    answers.append(await events_of(http, path, body))
    assert all(answer == answers[-1] for answer in answers)
    assert len(answers[0]) > 10


@pytest.fixture
def num_taken(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many tokens took the short way."""
    taken = []
    take = flow.TextFlow.take

    def count(self: flow.TextFlow, token_id: int, now: float) -> bool:
        is_taken = take(self, token_id, now)
        taken.append(is_taken)
        return is_taken

    monkeypatch.setattr(flow.TextFlow, "take", count)
    return lambda: sum(taken)


@pytest.mark.parametrize("sends_rows", [True, False])
async def test_plain_text_takes_the_short_way_and_is_counted(
    http: aiohttp.ClientSession,
    cluster: Cluster,
    num_taken: Callable[[], int],
    sends_rows: bool,
) -> None:
    cluster.decode.sends_rows = sends_rows
    body = {**TEXT, "ignore_eos": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/completions", json=body) as response:
        raw = await response.read()
    assert num_taken() > 50
    usage = orjson.loads(raw.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
    assert usage["completion_tokens"] == 100
    async with http.get("/metrics") as response:
        metrics = await response.text()
    (line,) = re.findall(r'pd_router_tokens_total\{[^}]*"output"[^}]*\} (\S+)', metrics)
    assert float(line) == 100
    (intervals,) = re.findall(r"pd_itl_seconds_count\S* (\S+)", metrics)
    assert float(intervals) == 99


@pytest.mark.parametrize("extra", [{"stop": ["END"]}, {"logprobs": 1}, {"return_token_ids": True}])
async def test_what_has_more_to_say_than_text_does_not(
    http: aiohttp.ClientSession,
    cluster: Cluster,
    num_taken: Callable[[], int],
    extra: dict[str, Any],
) -> None:
    assert await events_of(http, "/v1/completions", {**TEXT, **extra})
    assert num_taken() == 0


VOCABULARY = Tokenizer(train_tokenizer()).vocabulary
GROUPS = st.lists(
    st.lists(st.integers(0, len(VOCABULARY.pieces)), min_size=1, max_size=4), max_size=12
)


class FakeConnection:
    """Notes what is sent, as events."""

    def __init__(self) -> None:
        self.has_room = True
        self.outbox = self
        self.events: list[bytes] = []

    def add(self, connection: object, data: bytes) -> None:
        assert connection is self
        self.events.append(data)


class FakeTally:
    def __init__(self) -> None:
        self.num_tokens = 0

    def add(self, num_tokens: int, interval_s: float) -> None:
        assert interval_s == 0.5
        self.num_tokens += num_tokens


@given(GROUPS)
def test_tokens_that_come_together_are_one_event(groups: list[list[int]]) -> None:
    event = TextEvent({"text": TextEvent.HOLE})
    text, fed = (ChoiceText(VOCABULARY, OutputOptions()) for _ in range(2))
    connection, tally, moments = FakeConnection(), FakeTally(), [0.0, 0.0]
    way = flow.TextFlow(
        cast(Any, SimpleNamespace(text=text, index=1)),
        event,
        cast(Any, SimpleNamespace(connection=connection)),
        cast(Any, tally),
        moments,
    )
    expected = []
    num_fed = 0
    for number, group in enumerate(groups):
        moments[1] = number - 0.5
        piece = fed.feed(group, [], None)
        expected += [event.fill(piece.text)] if piece is not None else []
        is_one = len(group) == 1
        if is_one and way.take(group[0], float(number)):
            continue
        if not is_one and way.take_all(group, float(number)):
            continue
        assert moments[1] == number - 0.5
        num_fed += len(group)
        piece = text.feed(group, [], None)
        connection.events += [event.fill(piece.text)] if piece is not None else []
    assert connection.events == expected
    assert tally.num_tokens + num_fed == text.num_tokens == fed.num_tokens
    connection.has_room = False
    assert not way.take(40, 0.0)
    assert not way.take_all([40, 41], 0.0)
