"""What one attempt of a choice receives: prefill's token, decode's deltas, or the break of either.

Decode may be faster than prefill's answer: what it says before that is kept until the token it
follows is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.requests.generation import Generation
from runtime.errors import InternalError, TandemError, TransferFailedError
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from runtime.sampling import FinishReason
from runtime.wire import error_from_proto, finish_reason_from_proto


class AttemptSink:
    """A ``TokenSink`` that hands tokens over to its generation, each one once and in order."""

    def __init__(self, generation: Generation) -> None:
        """Tokens that other attempts handed over are not handed over again."""
        self._generation = generation
        self._has_first = False
        """Whether this attempt's prefill has answered."""
        self._early: list[decode_pb2.TokenDelta] = []
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_decode_lost = False
        """Whether this attempt's stream of tokens broke."""

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

    def close(self) -> None:
        """Mark the attempt's failure as seen, where nobody waited for it."""
        if self._ended.done() and not self._ended.cancelled():
            self._ended.exception()

    def on_first(self, first: prefill_pb2.FirstToken) -> None:
        """The prefill's token, then whatever decode said before it arrived here."""
        if self._ended.done():
            return
        generation = self._generation
        self._has_first = True
        generation.timings.merge(first.timings)
        if not generation.num_tokens:
            self._take_first(first)
        elif first.token_id != generation.output_token_ids[0]:
            # The client has the other one: no honest continuation is left.
            text = "the KV was lost after the first token, and another attempt began differently"
            self._break(TransferFailedError(text))
        early, self._early = self._early, []
        for delta in early:
            self.on_delta(delta)

    def _take_first(self, first: prefill_pb2.FirstToken) -> None:
        logprobs = (first.logprobs,) if first.HasField("logprobs") else ()
        finish = finish_reason_from_proto(first.finish_reason)
        self._generation.hand_over_first(first, logprobs, finish)
        self._end_if(finish)

    def on_delta(self, delta: decode_pb2.TokenDelta) -> None:
        """Tokens or the end, from decode."""
        if self._ended.done():
            return
        if delta.HasField("timings"):
            self._generation.timings.merge(delta.timings)
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
        generation = self._generation
        token_ids: Sequence[int] = delta.token_ids
        logprobs: Sequence[common_pb2.PositionLogprobs] = delta.logprobs
        num_known = generation.num_tokens - delta.start_index
        if num_known < 0:
            self._break(
                InternalError(
                    f"decode sent token {delta.start_index} of request {generation.request_id} "
                    f"after token {generation.num_tokens - 1}"
                )
            )
            return
        if num_known:
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if token_ids or finish is not None:
            generation.hand_over(token_ids, logprobs, finish)
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
