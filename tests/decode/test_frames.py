"""Deltas by router, and on the wire."""

from __future__ import annotations

from decode.frames import Delta, StepNews
from runtime.errors import OutOfBlocksError
from runtime.pb import common_pb2
from runtime.sampling import FinishReason, PositionLogprobs


def token(request_id: str, index: int) -> Delta:
    return Delta(request_id=request_id, start_index=index, token_ids=(index + 10,))


def test_news_are_sorted_by_router() -> None:
    news = StepNews()
    news.add("r0", token("a", 1))
    news.add("r1", token("b", 1))
    news.add("r0", token("c", 4))
    assert news.take() == {"r0": [token("a", 1), token("c", 4)], "r1": [token("b", 1)]}
    assert news.take() == {}


def test_a_delta_on_the_wire() -> None:
    delta = Delta(
        request_id="a",
        start_index=3,
        token_ids=(5,),
        logprobs=(PositionLogprobs(-0.5, (5, 6), (-0.5, -1.5)),),
        finish_reason=FinishReason.ERROR,
        error=OutOfBlocksError("no room"),
        timings=common_pb2.Timings(decode_reserve_s=2.0),
        num_cached_tokens=64,
    )
    message = delta.to_proto()
    assert message.error.request_id == "a"
    assert message.error.code == common_pb2.ERROR_CODE_OUT_OF_BLOCKS
    assert message.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert list(message.logprobs[0].top_ids) == [5, 6]
    assert message.timings.decode_reserve_s == 2.0
    assert (message.start_index, list(message.token_ids)) == (3, [5])
