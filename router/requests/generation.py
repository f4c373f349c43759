"""One choice on its way through the workers: what it asks for, and the tokens that came back.

Tokens reach an HTTP request through its ``Mailbox``. Frames put them there directly, without a task
per request or token; whatever arrives in one turn of the event loop is taken out together, by who
listens: no coroutine is woken for a token. What belongs to one try only is in
``router.requests.sink``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.pool.members import WorkerKey
from router.requests.drafts import DraftCounts
from router.requests.timings import RequestTimings
from runtime.errors import TandemError
from runtime.pb import common_pb2, prefill_pb2
from runtime.sampling import FinishReason, SamplingParams, finish_reason_after
from runtime.tiers import NO_TIER, Standing


@dataclass(slots=True)
class Output:
    """New tokens of one choice, or its end, or its failure."""

    choice: int
    """Its number in the HTTP request."""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[common_pb2.PositionLogprobs] = ()
    """Empty, or one per token."""
    finish_reason: FinishReason | None = None
    error: TandemError | None = None
    first: prefill_pb2.FirstToken | None = None
    """With the first token: prompt logprobs and cached tokens."""
    num_drafts: int = 0
    """That the step of these tokens verified."""


MAX_MAILBOX_BYTES = 16 * 2**20
_OUTPUT_BYTES = 200
_TOKEN_BYTES = 8
_POSITION_BYTES = 200
_TOP_BYTES = 12


CallSoon = Callable[[Callable[[], None]], object]


class Flow(Protocol):
    """The short way to the client, of tokens of which there is nothing else to say.

    Each method says whether it took them; ``now`` is their moment on the event loop's clock.
    """

    def take(self, token_id: int, now: float) -> bool:
        """One token."""

    def take_all(self, token_ids: Sequence[int], now: float) -> bool:
        """Several that came together."""


class Mailbox:
    """Outputs of all choices of one HTTP request; one consumer."""

    __slots__ = (
        "_call_soon",
        "_is_due",
        "_items",
        "_listener",
        "_loop",
        "_max_bytes",
        "_num_bytes",
        "_on_full",
        "_waiter",
    )

    def __init__(
        self,
        max_bytes: int = MAX_MAILBOX_BYTES,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_full`` is called once where the consumer leaves more than ``max_bytes``, about.

        What follows is dropped: the consumer's client does not read, and is to be cut off.
        """
        self._loop = asyncio.get_running_loop()
        self._items: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._call_soon: CallSoon = self._loop.call_soon
        self._is_due = False
        """Whether the listener is to be called in this turn of the loop or the next."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._on_full = on_full

    @property
    def is_empty(self) -> bool:
        """Whether all outputs were taken."""
        return not self._items

    def put(self, output: Output) -> None:
        """Add ``output`` and wake the consumer."""
        num_bytes = self._num_bytes
        if num_bytes > self._max_bytes:
            return
        self._items.append(output)
        num_bytes += _OUTPUT_BYTES + _TOKEN_BYTES * len(output.token_ids)
        if output.logprobs:
            num_bytes += _size_of_logprobs(output)
        self._num_bytes = num_bytes
        if num_bytes > self._max_bytes:
            self._on_full()
        if self._listener is not None:
            if not self._is_due:
                self._is_due = True
                self._call_soon(self._tell)
        elif self._waiter is not None:
            self.wake()

    def wake(self) -> None:
        """Let ``take`` return, with nothing if there is nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Output]:
        """All outputs since the last call; waits for one, or for ``wake``."""
        if not self._items:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_now()

    def take_now(self) -> list[Output]:
        """All outputs since the last call; none where none came."""
        items, self._items = self._items, []
        if self._num_bytes <= self._max_bytes:
            self._num_bytes = 0
        return items

    def listen(
        self, listener: Callable[[], None] | None, call_soon: CallSoon | None = None
    ) -> None:
        """Call ``listener`` once for each turn of the event loop in which outputs come.

        It takes them, or leaves them here until its client has room. What is here now counts as
        having come. None: call nobody any more. ``call_soon``: of who takes such calls together;
        None: the event loop's.
        """
        self._call_soon = call_soon or self._loop.call_soon
        self._listener = listener
        if listener is not None and self._items and not self._is_due:
            self._is_due = True
            self._call_soon(self._tell)

    def _tell(self) -> None:
        self._is_due = False
        if self._listener is not None:
            self._listener()


def _size_of_logprobs(output: Output) -> int:
    """About what the log-probabilities of ``output`` take of memory.

    Not those of its prompt, which come once and are bounded (``MAX_PROMPT_LOGPROBS``).
    """
    return sum(_POSITION_BYTES + _TOP_BYTES * len(p.top_ids) for p in output.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """An attempt that another one followed."""

    request_id: str
    """By which its workers know it."""
    workers: tuple[WorkerKey, WorkerKey]
    """(prefill, decode)."""
    started: float
    ended: float
    """Both on the event loop's clock."""
    num_tokens: int
    """Handed over so far when it ended."""
    reason: str
    """Why it ended: an error code, or that another rank has room."""


class Generation:
    """The state of one choice, over all attempts. Owned by the pipeline task that drives it."""

    def __init__(
        self,
        *,
        request_id: str,
        index: int,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        cache_salt: str,
        mailbox: Mailbox,
        received: float,
        conversation: str = "",
        explain: bool = False,
        standing: Standing = NO_TIER,
        key_name: str = "",
    ) -> None:
        """``request_id`` is unique in the cluster: workers know the choice by it.

        ``conversation`` names the conversation of which this is a turn, if any; with ``explain``
        ``why`` says how the pair was picked.
        """
        self.request_id = request_id
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.cache_salt = cache_salt
        self.conversation = conversation
        self.explain = explain
        self.why: Mapping[str, object] | None = None
        """Of the first attempt."""
        self.standing = standing
        """As it was when the request was received."""
        self.key_name = key_name
        """Of the API key that it came with; "" where none is asked for."""
        self.timings = RequestTimings(received)
        self.phase = "waiting for a worker"
        self.workers: tuple[WorkerKey, WorkerKey] | None = None
        """(prefill, decode) of the latest attempt."""
        self.past: Sequence[PastAttempt] = ()
        """Those before it, in their order."""
        self.worker_request_id = request_id
        """By which the workers of the latest attempt know it."""
        self.num_cached_tokens = 0
        self.drafts = DraftCounts()
        """Of all attempts. Who reads the mailbox adds what its outputs say."""
        self.output_token_ids: list[int] = []
        """Handed over so far, in order."""
        self.flow: Flow | None = None
        """Is asked first whether it takes plain tokens, while the mailbox is empty."""
        self._mailbox = mailbox
        self.loop = asyncio.get_running_loop()
        """Kept: asking for it is a system call, and a request would do so twenty times."""

    @property
    def num_tokens(self) -> int:
        """Output tokens handed over so far."""
        return len(self.output_token_ids)

    @property
    def context_token_ids(self) -> list[int]:
        """Prompt and output so far: what the next attempt goes on from."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    def standing_now(self) -> Standing:
        """With what is left of its target; nothing is, once the client has its first token."""
        waited_s = math.inf if self.num_tokens else self.loop.time() - self.timings.received
        return self.standing.with_ttft_left(waited_s)

    def finish_so_far(self) -> FinishReason | None:
        """Why nothing can follow what was handed over; None where something can."""
        if not self.output_token_ids:
            return None
        # max_tokens is capped by the model's context already.
        num_prompt_tokens = len(self.prompt_token_ids)
        return finish_reason_after(
            self.output_token_ids[-1],
            num_output_tokens=self.num_tokens,
            num_tokens=num_prompt_tokens + self.num_tokens,
            params=self.sampling,
            max_model_len=num_prompt_tokens + self.sampling.max_tokens,
        )

    def attempt_ended(self, reason: str) -> None:
        """Another attempt is to follow the latest one."""
        assert self.workers is not None
        ended = PastAttempt(
            request_id=self.worker_request_id,
            workers=self.workers,
            started=self.timings.attempt_started,
            ended=self.loop.time(),
            num_tokens=self.num_tokens,
            reason=reason,
        )
        self.past = (*self.past, ended)

    def fail(self, error: TandemError) -> None:
        """Hand the failure over; nothing follows."""
        error.request_id = error.request_id or self.request_id
        self._mailbox.put(Output(self.index, error=error))

    def hand_over_first(
        self,
        first: prefill_pb2.FirstToken,
        logprobs: Sequence[common_pb2.PositionLogprobs],
        finish: FinishReason | None,
    ) -> None:
        """The first output token of all."""
        timings = self.timings
        timings.first_token = timings.last_token = time.monotonic()
        self.num_cached_tokens = first.num_cached_tokens
        token_ids = (first.token_id,)
        self.output_token_ids += token_ids
        self._mailbox.put(Output(self.index, token_ids, logprobs, finish, None, first))

    def hand_over(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        finish: FinishReason | None,
        num_drafts: int = 0,
    ) -> None:
        """The tokens that follow, of a step that verified ``num_drafts``, or the end alone."""
        self.timings.last_token = self.loop.time()
        self.output_token_ids += token_ids
        output = Output(self.index, token_ids, logprobs, finish, num_drafts=num_drafts)
        self._mailbox.put(output)

    def hand_over_token(self, token_id: int, now: float) -> None:
        """The one that follows, at ``now`` of the event loop's clock, and nothing else."""
        self.timings.last_token = now
        self.output_token_ids.append(token_id)
        flow = self.flow
        if flow is not None and self._mailbox.is_empty and flow.take(token_id, now):
            return
        self._mailbox.put(Output(self.index, (token_id,)))

    def hand_over_tokens(self, token_ids: Sequence[int], now: float, num_drafts: int) -> None:
        """The same of several that came together, of a step that verified ``num_drafts``."""
        self.timings.last_token = now
        self.output_token_ids += token_ids
        flow = self.flow
        if flow is not None and self._mailbox.is_empty and flow.take_all(token_ids, now):
            if num_drafts:
                self.drafts.add(num_drafts, len(token_ids) - 1)
            return
        self._mailbox.put(Output(self.index, token_ids, num_drafts=num_drafts))
