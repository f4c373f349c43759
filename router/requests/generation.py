"""One choice on its way through the workers: what it asks for, and the tokens that came back.

Tokens reach an HTTP request through its ``Mailbox``. Frames put them there directly, without a task
per request or token; whatever arrives in one turn of the event loop is taken out together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.errors import InternalError, TandemError, TransferFailedError
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from runtime.sampling import FinishReason, SamplingParams
from runtime.wire import error_from_proto, finish_reason_from_proto


class Output(NamedTuple):
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


MAX_MAILBOX_BYTES = 16 * 2**20
_OUTPUT_BYTES = 200
_TOKEN_BYTES = 8
_POSITION_BYTES = 200
_TOP_BYTES = 12


class Mailbox:
    """Outputs of all choices of one HTTP request; one consumer."""

    __slots__ = ("_items", "_max_bytes", "_num_bytes", "_on_full", "_waiter")

    def __init__(
        self,
        max_bytes: int = MAX_MAILBOX_BYTES,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_full`` is called once where the consumer leaves more than ``max_bytes``, about.

        What follows is dropped: the consumer's client does not read, and is to be cut off.
        """
        self._items: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._on_full = on_full

    def put(self, output: Output) -> None:
        """Add ``output`` and wake the consumer."""
        if self._num_bytes > self._max_bytes:
            return
        self._items.append(output)
        self._num_bytes += _size_of(output)
        if self._num_bytes > self._max_bytes:
            self._on_full()
        self.wake()

    def wake(self) -> None:
        """Let ``take`` return, with nothing if there is nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Output]:
        """All outputs since the last call; waits for one, or for ``wake``."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        if self._num_bytes <= self._max_bytes:
            self._num_bytes = 0
        return items


def _size_of(output: Output) -> int:
    """About what ``output`` takes of memory."""
    num_bytes = _OUTPUT_BYTES + _TOKEN_BYTES * len(output.token_ids)
    positions = [*output.logprobs, *(output.first.prompt_logprobs if output.first else ())]
    return num_bytes + sum(_POSITION_BYTES + _TOP_BYTES * len(p.top_ids) for p in positions)


@dataclass(slots=True)
class RequestTimings:
    """Moments of one choice on the event loop's clock, and what workers measured, in seconds."""

    received: float
    reserve_sent: float = 0.0
    run_sent: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    worker: dict[str, float] = field(default_factory=dict)

    def merge(self, timings: common_pb2.Timings) -> None:
        """Keep what ``timings`` says; a field that nobody filled is left out."""
        self.worker.update({item.name: value for item, value in timings.ListFields()})

    def split(self) -> dict[str, float]:
        """Seconds per stage, those known; ``router_s`` is all before the first call to a worker."""
        stages = {
            "router_s": self.reserve_sent - self.received,
            "reserve_s": self.run_sent - self.reserve_sent,
            "ttft_s": self.first_token - self.received,
            "total_s": self.ended - self.received,
        }
        known = {name: value for name, value in stages.items() if value >= 0.0}
        return {name: round(value, 6) for name, value in {**known, **self.worker}.items()}


class Generation:
    """The state of one choice; a ``TokenSink``. Owned by the pipeline task that drives it."""

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
    ) -> None:
        """``request_id`` is unique in the cluster: workers know the choice by it."""
        self.request_id = request_id
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.cache_salt = cache_salt
        self.timings = RequestTimings(received)
        self.phase = "waiting for a worker"
        self.num_cached_tokens = 0
        self._mailbox = mailbox
        self._num_tokens = 0
        self._first_token: int | None = None
        self._has_first = False
        """Whether this attempt's prefill has answered."""
        self._early: list[decode_pb2.TokenDelta] = []
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_decode_lost = False
        """Whether this attempt's stream of tokens broke."""

    @property
    def num_tokens(self) -> int:
        """Output tokens handed over so far."""
        return self._num_tokens

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the last token was handed over; raises what broke this attempt."""
        return self._ended

    @property
    def completed(self) -> bool:
        """Whether the last token was handed over: the workers have nothing left to end.

        Asked rather than remembered by who awaits ``ended``: that task is often cancelled first, by
        the consumer that saw the last token.
        """
        ended = self._ended
        return ended.done() and not ended.cancelled() and ended.exception() is None

    def begin_attempt(self) -> None:
        """Forget an attempt that failed with no token but the first handed over.

        Tokens follow from the prompt, the sampling and its seed, so another attempt begins with the
        same one; ``on_first`` sees to it.
        """
        assert self._num_tokens <= 1
        self.close_attempt()
        self._has_first = False
        self._early = []
        self._ended = asyncio.get_running_loop().create_future()
        self.is_decode_lost = False

    def close_attempt(self) -> None:
        """Mark the attempt's failure as seen, where nobody waited for it."""
        if self._ended.done() and not self._ended.cancelled():
            self._ended.exception()

    def fail(self, error: TandemError) -> None:
        """Hand the failure over; nothing follows."""
        error.request_id = error.request_id or self.request_id
        self._mailbox.put(Output(self.index, error=error))

    def on_first(self, first: prefill_pb2.FirstToken) -> None:
        """The prefill's token, then whatever decode said before it arrived here."""
        if self._ended.done():
            return
        self._has_first = True
        self.timings.merge(first.timings)
        if self._first_token is None:
            self._take_first(first)
        elif first.token_id != self._first_token:
            # The client has the other one: no honest continuation is left.
            text = "the KV was lost after the first token, and another attempt began differently"
            self._break(TransferFailedError(text))
        early, self._early = self._early, []
        for delta in early:
            self.on_delta(delta)

    def _take_first(self, first: prefill_pb2.FirstToken) -> None:
        self.timings.first_token = asyncio.get_running_loop().time()
        self.num_cached_tokens = first.num_cached_tokens
        self._first_token = first.token_id
        self._num_tokens = 1
        logprobs = (first.logprobs,) if first.HasField("logprobs") else ()
        finish = finish_reason_from_proto(first.finish_reason)
        self._hand_over((first.token_id,), logprobs, finish, first)

    def on_delta(self, delta: decode_pb2.TokenDelta) -> None:
        """Tokens or the end, from decode."""
        if self._ended.done():
            return
        if delta.HasField("timings"):
            self.timings.merge(delta.timings)
        finish = finish_reason_from_proto(delta.finish_reason)
        if finish in (FinishReason.ERROR, FinishReason.ABORT) or delta.HasField("error"):
            self._break(_error_of(delta))
        elif not self._has_first:
            self._early.append(delta)
        else:
            self._take(delta, finish)

    def on_lost(self, error: TandemError) -> None:
        """The stream of tokens broke."""
        self.is_decode_lost = True
        if not self._ended.done():
            self._break(error)

    def _take(self, delta: decode_pb2.TokenDelta, finish: FinishReason | None) -> None:
        token_ids: Sequence[int] = delta.token_ids
        logprobs: Sequence[common_pb2.PositionLogprobs] = delta.logprobs
        num_known = self._num_tokens - delta.start_index
        if num_known < 0:
            self._break(
                InternalError(
                    f"decode sent token {delta.start_index} of request {self.request_id} "
                    f"after token {self._num_tokens - 1}"
                )
            )
            return
        if num_known:
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if token_ids or finish is not None:
            self._num_tokens += len(token_ids)
            self._hand_over(token_ids, logprobs, finish)

    def _hand_over(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        finish: FinishReason | None,
        first: prefill_pb2.FirstToken | None = None,
    ) -> None:
        self._mailbox.put(Output(self.index, token_ids, logprobs, finish, None, first))
        if finish is not None:
            self._ended.set_result(None)

    def _break(self, error: TandemError) -> None:
        self._ended.set_exception(error)


def _error_of(delta: decode_pb2.TokenDelta) -> TandemError:
    if delta.HasField("error"):
        return error_from_proto(delta.error)
    reason = common_pb2.FinishReason.Name(delta.finish_reason)
    return InternalError(f"decode ended the request with {reason} and no error")
