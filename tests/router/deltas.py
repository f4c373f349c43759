"""The news of a fake decode rank, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.pb import common_pb2, decode_pb2
from runtime.wire import error_to_proto

if TYPE_CHECKING:
    from tests.router.fakes import FakeDecode, Tokens


def delta_of(
    decode: FakeDecode, request: decode_pb2.ReserveRequest, tokens: Tokens, index: int
) -> decode_pb2.TokenDelta:
    """The news of one step."""
    if index == decode.fail_after or decode.fails_always:
        error = error_to_proto(decode.fail_error, request.request_id)
        delta = decode.error_delta(request.request_id, error)
        delta.start_index = index
        return delta
    first = index - 1 if decode.repeat_tokens else index
    token_ids = tokens.until(index + 1)[first:]
    delta = decode_pb2.TokenDelta(
        request_id=request.request_id,
        start_index=first,
        token_ids=token_ids,
        finish_reason=decode.finish_reason or tokens.finish_at(index),  # type: ignore[arg-type]
    )
    if decode.loses_finish:
        delta.finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED
    num_logprobs = request.sampling.num_logprobs
    if num_logprobs >= 0:
        delta.logprobs.extend(position_logprobs(token, num_logprobs) for token in token_ids)
    if index == request.num_output_tokens + 1:
        delta.timings.kv_transfer_s = 0.002
    return delta


def position_logprobs(token_id: int, count: int) -> common_pb2.PositionLogprobs:
    """A made-up distribution in which ``token_id`` is the best."""
    return common_pb2.PositionLogprobs(
        logprob=-0.5,
        top_ids=[token_id + i for i in range(count)],
        top_logprobs=[-0.5 - i for i in range(count)],
    )
