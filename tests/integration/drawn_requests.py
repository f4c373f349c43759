"""Requests of every kind of sampling, drawn; their answers; and how two answers are compared.

A request is the body of ``POST /v1/completions``, and its answer is all choices of it with tokens,
text, reason and log-probabilities. Half of them are streamed, and some of these hang up.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

BLOCK_SIZE = 16
LOGPROB_ERROR = 1e-5
MAX_LOGPROB_ERROR = 5e-5
"""Of float32 sums in another order: two runs without drafts are up to 1.5e-5 apart, as the batches
of a cluster are never made up alike twice. Nearly all are within `LOGPROB_ERROR`."""
_SOURCES = ("engine", "decode")
_LONG = range(60, 100)
_CROWD = 140
"""Output tokens: a rank that has seen nothing yet expects half as many."""
KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "greedy": lambda draw: {"temperature": 0.0},
    "temperature 1": lambda draw: {"temperature": 1.0},
    "top-p": lambda draw: {"temperature": 0.8, "top_p": 0.9, "top_k": draw.choice([0, 20])},
    "penalties": lambda draw: {
        "temperature": draw.choice([0.0, 0.9]),
        "repetition_penalty": draw.choice([1.0, 1.2]),
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
    "bias": lambda draw: {
        "temperature": draw.choice([0.0, 1.0]),
        "logit_bias": {str(draw.randrange(4096)): draw.choice([-5.0, 3.0]) for _ in range(8)},
    },
    "logprobs": lambda draw: {"temperature": draw.choice([0.0, 1.0]), "logprobs": 3},
    "n = 4": lambda draw: {"temperature": 1.0, "n": 4, "logprobs": 1},
    "stop strings": lambda draw: {
        "temperature": draw.choice([0.0, 0.8]),
        "stop": draw.sample(["\n", "):", " =", "self.", "return"], 2),
    },
    "least tokens and stop tokens": lambda draw: {
        "temperature": draw.choice([0.0, 1.0]),
        "stop_token_ids": draw.sample(range(20, 600), 100),
        "min_tokens": draw.randrange(6),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRequest:
    """One request.

    Attributes:
        kind: of its sampling, one of `KINDS`.
        body: to be sent.
        hangs_up_after: events; None if it stays to the end.
    """

    kind: str
    body: dict[str, Any]
    hangs_up_after: int | None = None


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice, as far as it came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """Take in a choice of an event or of a whole answer."""
        self.token_ids += choice.get("token_ids") or []
        self.text += choice["text"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        if choice.get("logprobs"):
            self.logprobs += choice["logprobs"]["token_logprobs"]
            self.top_logprobs += choice["logprobs"]["top_logprobs"] or []


@dataclass(slots=True)
class Answer:
    """What a request was answered; `error` is of the whole request."""

    choices: list[ChoiceAnswer]
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


def draw_requests(seed: int, count: int) -> Iterator[DrawnRequest]:
    """Draw requests; the kinds take turns.

    Prompts are pieces of Python source, now and then random tokens. A third has exactly k blocks, a
    sixth a token more or less; a quarter begins with one of eight beginnings of two or three
    blocks, and some are a prompt of before once more.
    """
    draw, source = random.Random(seed), _source_ids()
    beginnings = [_piece(draw, source, BLOCK_SIZE * draw.choice([2, 3])) for _ in range(8)]
    before: list[list[int]] = []
    kinds = list(KINDS)
    for index in range(count):
        kind = kinds[index % len(kinds)]
        prompt = _draw_prompt(draw, source, beginnings)
        if before and draw.random() < 0.05:
            prompt = draw.choice(before)
        before = [*before[-50:], prompt]
        most = draw.choice(_LONG) if draw.random() < 0.03 else draw.randint(1, 14)
        sampling = KINDS[kind](draw)
        if "n" in sampling:
            most = min(most, 8)
        if "min_tokens" in sampling:
            sampling["min_tokens"] = min(sampling["min_tokens"], most)
        is_streamed = draw.random() < 0.5
        body = {
            **{"model": "tandem-python", "prompt": prompt, "max_tokens": most, **sampling},
            **{"seed": draw.getrandbits(63), "ignore_eos": draw.random() < 0.5},
            **{"return_token_ids": True, "stream": is_streamed},
        }
        leaves = is_streamed and draw.random() < 0.08
        hangs_up_after = draw.randrange(1, 10) if leaves else None
        yield DrawnRequest(kind=kind, body=body, hangs_up_after=hangs_up_after)


def draw_crowd(seed: int, count: int) -> Iterator[DrawnRequest]:
    """Draw requests that grow by more than fresh ranks expect: those of small pools preempt some.

    They end at their length, so that none makes room early.
    """
    draw, source = random.Random(seed), _source_ids()
    for index in range(count):
        body = {
            **{"model": "tandem-python", "prompt": _piece(draw, source, 60)},
            **{"max_tokens": _CROWD, "ignore_eos": True, "temperature": index % 2 * 0.9},
            **{"seed": draw.getrandbits(63), "return_token_ids": True, "stream": index % 4 < 2},
        }
        yield DrawnRequest(kind="crowd", body=body)


def _source_ids() -> list[int]:
    root = Path(__file__).parents[2]
    tokenizer = Tokenizer.from_file(str(root / "deploy/models/tandem-python/tokenizer.json"))
    files = [file for folder in _SOURCES for file in sorted((root / folder).glob("*.py"))]
    ids: list[int] = tokenizer.encode("\n".join(map(Path.read_text, files))).ids
    return ids


def _draw_prompt(
    draw: random.Random, source: Sequence[int], beginnings: Sequence[list[int]]
) -> list[int]:
    shape = draw.random()
    if shape < 1 / 3:
        length = BLOCK_SIZE * draw.randint(1, 5)
    elif shape < 1 / 2:
        length = BLOCK_SIZE * draw.randint(1, 5) + draw.choice([-1, 1])
    else:
        length = draw.randint(1, 90)
    prompt = _piece(draw, source, length)
    if draw.random() < 0.1:
        return [draw.randrange(300, 4000) for _ in range(length)]
    if draw.random() < 0.25:
        beginning = draw.choice(beginnings)
        return beginning[:length] + prompt[len(beginning) :]
    return prompt


def _piece(draw: random.Random, source: Sequence[int], length: int) -> list[int]:
    start = draw.randrange(len(source) - length)
    return list(source[start : start + length])


async def ask_all(
    base_url: str,
    requests: Sequence[DrawnRequest],
    *,
    concurrency: int,
    may_hang_up: bool,
    at: dict[int, Callable[[], None]] | None = None,
) -> list[Answer]:
    """Send requests, so many at a time.

    Args:
        base_url: of a router.
        requests: to be sent in order.
        concurrency: requests at a time.
        may_hang_up: whether those do that are drawn so.
        at: what is done, on a thread beside the requests, when so many were sent.

    Returns:
        Their answers, in order.
    """
    gate, actions = asyncio.Semaphore(concurrency), at or {}
    answers: list[Answer] = [Answer([]) for _ in requests]
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    session = aiohttp.ClientSession(base_url, connector=connector, timeout=timeout)

    async def one(place: int) -> None:
        hangs_up_after = requests[place].hangs_up_after if may_hang_up else None
        answers[place] = await _ask(session, requests[place].body, hangs_up_after)

    async with session, asyncio.TaskGroup() as group:
        for place in range(len(requests)):
            await gate.acquire()
            if place in actions:
                group.create_task(asyncio.to_thread(actions[place]))
            group.create_task(one(place)).add_done_callback(lambda _: gate.release())
    return answers


async def _ask(
    session: aiohttp.ClientSession, body: dict[str, Any], hangs_up_after: int | None
) -> Answer:
    answer = Answer([ChoiceAnswer() for _ in range(body.get("n", 1))])
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            answer.error = await response.text()
        elif not body["stream"]:
            _add(answer, await response.json())
        else:
            num_events = 0
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                _add(answer, json.loads(line[6:]))
                num_events += 1
                if hangs_up_after is not None and num_events >= hangs_up_after:
                    response.close()
                    break
    return answer


def _add(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    answer.usage = event.get("usage") or answer.usage
    for choice in event["choices"]:
        answer.choices[choice["index"]].add(choice)


@dataclass(slots=True)
class Comparison:
    """What two series of answers have in common, counted.

    Attributes:
        num_tokens: that were compared, and are the same.
        num_logprobs: likewise.
        num_further_logprobs: of these, those more than `LOGPROB_ERROR` apart.
        max_logprob_error: of these, the largest.
        different: a line for each answer that is not the same.
        far: a line for each choice of the same tokens and text some of whose log-probabilities are
            more than `MAX_LOGPROB_ERROR` apart: where a gate takes two experts for equally good,
            rounding chooses, and one process without drafts says either, by how many it batches.
        num_by_kind: requests compared, by kind; those that hung up are of a kind of their own.
    """

    num_tokens: int = 0
    num_logprobs: int = 0
    num_further_logprobs: int = 0
    max_logprob_error: float = 0.0
    different: list[str] = field(default_factory=list)
    far: list[str] = field(default_factory=list)
    num_by_kind: dict[str, int] = field(default_factory=dict)

    def add(self, request: DrawnRequest, actual: Answer, expected: Answer) -> None:
        """Compare the answers to one request; whoever hung up has a beginning."""
        hung_up = request.hangs_up_after is not None
        kind = "hung up" if hung_up else request.kind
        self.num_by_kind[kind] = self.num_by_kind.get(kind, 0) + 1
        problem = actual.error or expected.error
        for ours, theirs in zip(actual.choices, expected.choices, strict=True):
            problem = problem or self._add_choice(ours, theirs, may_be_short=hung_up)
        if problem:
            self.different.append(f"{problem}: {request}")

    def _add_choice(self, ours: ChoiceAnswer, theirs: ChoiceAnswer, *, may_be_short: bool) -> str:
        """Return what is different, or nothing."""
        count = len(ours.token_ids) if may_be_short else len(theirs.token_ids)
        if ours.token_ids != theirs.token_ids[:count]:
            return f"tokens {ours.token_ids} instead of {theirs.token_ids}"
        if may_be_short:
            is_same_text = theirs.text.startswith(ours.text)
        else:
            is_same_text = (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        if not is_same_text:
            return f"{ours.text!r}, {ours.finish_reason} instead of {theirs}"
        self.num_tokens += count
        if not may_be_short and len(ours.logprobs) != len(theirs.logprobs):
            return f"{len(ours.logprobs)} log-probabilities instead of {len(theirs.logprobs)}"
        pairs = list(zip(ours.logprobs, theirs.logprobs, strict=False))
        for our_top, their_top in zip(ours.top_logprobs, theirs.top_logprobs, strict=False):
            # Which of two that are equally likely is the last of the list is a matter of rounding.
            pairs += zip(sorted(our_top.values()), sorted(their_top.values()), strict=True)
        errors = [abs(a - b) for a, b in pairs]
        error = max(errors, default=0.0)
        self.num_logprobs += len(pairs)
        self.num_further_logprobs += sum(each > LOGPROB_ERROR for each in errors)
        self.max_logprob_error = max(self.max_logprob_error, error)
        if error > MAX_LOGPROB_ERROR:
            self.far.append(f"log-probabilities {error:.1e} apart: {ours.token_ids}")
        return ""
