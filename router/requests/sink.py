"""What one attempt of a choice receives: prefill's token, decode's deltas, or the break of either.

Decode may be faster than prefill's answer: what it says before that is kept until the token it
follows is there. After a stream that broke tokens may come twice; each is handed over once.
"""

from __future__ import annotations

import asyncio

from router.requests.generation import Generation
from runtime.errors import InternalError, TandemError
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from runtime.rpc.wire import error_from_proto, finish_reason_from_proto
from runtime.sampling import FinishReason

_FAILURES = (FinishReason.ERROR, FinishReason.ABORT)


class AttemptSink:
    """A ``TokenSink`` that hands tokens over to its generation, each one once and in order."""

    def __init__(self, generation: Generation) -> None:
        """The attempt goes on where ``generation`` stands now."""
        self._generation = generation
        self._first_index = generation.num_tokens
        """Output index of prefill's token; decode's begin behind it."""
        self._has_first = False
        """Whether this attempt's prefill has answered."""
        self._has_logprobs = generation.sampling.num_logprobs >= 0
        self._early: list[decode_pb2.TokenDelta] = []
        self._is_flowing = False
        """Whether both workers have begun: a token needs nothing but its place in the output."""
        self._is_whole = False
        """Whether decode has said its last, which may wait for prefill's token."""
        self._mask_cpu_s = 0.0
        """Of decode's part of this attempt, as far as it was told."""
        self._loop = generation.loop
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.is_reserved = False
        """Whether decode knows the attempt."""
        self.is_decode_lost = False
        """Whether this attempt's stream of tokens broke."""
        self.has_decode_tokens = False
        """Whether decode has begun: the KV was there."""

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

    @property
    def next_index(self) -> int | None:
        """Output index of the next token that decode has to send; None where nothing is missing."""
        if not self.is_reserved or self._is_whole or self._ended.done():
            return None
        if self._has_first:
            return self._generation.num_tokens
        ends = [delta.start_index + len(delta.token_ids) for delta in self._early]
        return max(ends, default=self._first_index + 1)

    def close(self) -> None:
        """Mark the attempt's failure as seen, where nobody waited for it."""
        if self._ended.done() and not self._ended.cancelled():
            self._ended.exception()

    def on_first(self, first: prefill_pb2.FirstToken) -> None:
        """The prefill's token, then whatever decode said before it arrived here."""
        generation = self._generation
        if self._ended.done():
            return
        if first.index != self._first_index:
            where = f"token {first.index} of request {generation.request_id}"
            self._break(InternalError(f"prefill sent {where} instead of {self._first_index}"))
            return
        self._has_first = True
        self._merge(first.timings)
        generation.timings.mask_cpu_s += first.timings.mask_cpu_s
        logprobs = (first.logprobs,) if first.HasField("logprobs") else ()
        finish = finish_reason_from_proto(first.finish_reason)
        if first.index == 0:
            generation.hand_over_first(first, logprobs, finish)
        else:
            generation.hand_over((first.token_id,), logprobs, finish)
        self._end_if(finish)
        early, self._early = self._early, []
        for delta in early:
            self.on_delta(delta)

    def on_token(self, index: int, token_id: int, now: float) -> None:
        """One token and nothing else, from decode, at ``now`` of the event loop's clock."""
        generation = self._generation
        if (
            self._is_flowing
            and index == len(generation.output_token_ids)
            and not self._ended.done()
        ):
            generation.hand_over_token(token_id, now)
        else:
            self.on_delta(decode_pb2.TokenDelta(start_index=index, token_ids=[token_id]))

    def on_tokens(
        self, start_index: int, token_ids: list[int], now: float, num_drafts: int
    ) -> None:
        """Tokens and nothing else, from decode."""
        generation = self._generation
        if (
            token_ids
            and self._is_flowing
            and start_index == len(generation.output_token_ids)
            and not self._ended.done()
        ):
            generation.hand_over_tokens(token_ids, now, num_drafts)
        else:
            self.on_delta(
                decode_pb2.TokenDelta(
                    start_index=start_index, token_ids=token_ids, num_drafts=num_drafts
                )
            )

    def on_delta(self, delta: decode_pb2.TokenDelta) -> None:
        """Tokens or the end, from decode."""
        if self._ended.done():
            return
        if delta.HasField("timings"):
            self._merge(delta.timings)
            more_s = delta.timings.mask_cpu_s - self._mask_cpu_s
            self._generation.timings.mask_cpu_s += more_s
            self._mask_cpu_s = delta.timings.mask_cpu_s
        finish = None
        if delta.finish_reason:  # rare: nearly every delta is one token in the middle of a stream
            finish = finish_reason_from_proto(delta.finish_reason)
        if finish in _FAILURES or delta.HasField("error"):
            self._break(_error_of(delta))
            return
        self.has_decode_tokens = True
        self._is_whole = finish is not None
        if self._has_first:
            self._take(delta, finish)
        else:
            self._early.append(delta)

    def on_lost(self, error: TandemError) -> None:
        """No more deltas will come."""
        self.is_decode_lost = True
        if not self._ended.done():
            self._break(error)

    def _merge(self, timings: common_pb2.Timings) -> None:
        if self._first_index == 0:  # of the way to the request's first token, not of a later one's
            self._generation.timings.merge(timings)

    def _take(self, delta: decode_pb2.TokenDelta, finish: FinishReason | None) -> None:
        generation = self._generation
        token_ids = delta.token_ids[:]  # a list: every use of protobuf's own container costs more
        logprobs = delta.logprobs[:] if self._has_logprobs else []
        num_known = len(generation.output_token_ids) - delta.start_index
        if num_known < 0:
            self._break(
                InternalError(
                    f"decode sent token {delta.start_index} of request {generation.request_id} "
                    f"after token {generation.num_tokens - 1}"
                )
            )
            return
        self._is_flowing = True
        num_drafts = delta.num_drafts
        is_plain = not (num_known or num_drafts or logprobs)
        if is_plain and len(token_ids) == 1 and finish is None:
            generation.hand_over_token(token_ids[0], self._loop.time())
            return
        if num_known:  # some of it is here for the second time, and its drafts are counted
            token_ids, logprobs, num_drafts = token_ids[num_known:], logprobs[num_known:], 0
        if token_ids or finish is not None:
            generation.hand_over(token_ids, logprobs, finish, num_drafts)
            self._end_if(finish)

    def _end_if(self, finish: FinishReason | None) -> None:
        if finish is not None:
            self._ended.set_result(None)

    def _break(self, error: TandemError) -> None:
        self._ended.set_exception(error)


def _error_of(delta: decode_pb2.TokenDelta) -> TandemError:
    if delta.HasField("error"):
        return error_from_proto(delta.error)
    reason = common_pb2.FinishReason.Name(delta.finish_reason)
    return InternalError(f"decode ended the request with {reason} and no error")
