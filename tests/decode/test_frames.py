"""Deltas by router, and on the wire."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode.answers import tell_tokens
from decode.frames import Delta, StepNews, fill_frame
from engine.sampling.inputs import SampledToken
from runtime.errors import OutOfBlocksError
from runtime.pb import common_pb2, decode_pb2
from runtime.sampling import FinishReason, PositionLogprobs
from tests.decode.helpers import make_request


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


DELTAS = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(["tokens", "tokens", "tokens", "logprobs", "timings", "finish"]),
        st.integers(0, 3),
    ),
    max_size=30,
)
ROW_IDS = {"a": 1, "b": 2**40, "c": 3, "d": 0}
"""The router reads no rows of d."""


def deltas_of(news: list[tuple[str, str, int]]) -> list[Delta]:
    """Steps of requests, in the order in which they were emitted."""
    next_index = dict.fromkeys("abcd", 1)
    deltas = []
    for request_id, kind, num_tokens in news:
        index = next_index[request_id]
        token_ids = tuple(range(index, index + num_tokens))
        next_index[request_id] += num_tokens
        delta = Delta(
            request_id=request_id,
            row_id=ROW_IDS[request_id],
            start_index=index,
            token_ids=token_ids,
            logprobs=(PositionLogprobs(-0.5, (), ()),) * num_tokens if kind == "logprobs" else (),
            timings=common_pb2.Timings(kv_transfer_s=1.0) if kind == "timings" else None,
            finish_reason=FinishReason.LENGTH if kind == "finish" else None,
        )
        deltas.append(delta)
    return deltas


def read_rows(rows: decode_pb2.TokenRows) -> list[tuple[int, int, list[int]]]:
    """(row id, index of the first token, tokens)."""
    assert not rows.num_tokens or len(rows.num_tokens) == len(rows.row_ids)
    token_ids = iter(rows.token_ids)
    sizes = rows.num_tokens or [1] * len(rows.row_ids)
    read = [
        (row_id, index, [next(token_ids) for _ in range(size)])
        for row_id, index, size in zip(rows.row_ids, rows.start_indexes, sizes, strict=True)
    ]
    assert list(token_ids) == []
    return read


@given(DELTAS)
def test_rows_and_then_deltas_tell_each_request_everything_in_order(
    news: list[tuple[str, str, int]],
) -> None:
    deltas = deltas_of(news)
    frame = decode_pb2.Frame()
    fill_frame(frame, deltas)
    names = {row_id: name for name, row_id in ROW_IDS.items()}
    read: dict[str, list[int]] = {name: [] for name in "abcd"}
    for row_id, index, token_ids in read_rows(frame.rows):
        assert row_id
        assert index == len(read[names[row_id]]) + 1
        read[names[row_id]] += token_ids
    for message in frame.deltas:
        assert message.start_index == len(read[message.request_id]) + 1
        read[message.request_id] += message.token_ids
    for name in "abcd":
        assert read[name] == [i for d in deltas if d.request_id == name for i in d.token_ids]
    assert len(frame.rows.row_ids) + len(frame.deltas) == len(deltas)


def test_a_step_of_plain_tokens_is_rows_alone() -> None:
    frame = decode_pb2.Frame()
    fill_frame(frame, deltas_of([("a", "tokens", 1), ("b", "tokens", 1), ("a", "tokens", 1)]))
    assert read_rows(frame.rows) == [(1, 1, [1]), (2**40, 1, [1]), (1, 2, [2])]
    assert (len(frame.deltas), list(frame.rows.num_tokens)) == (0, [])
    empty = decode_pb2.Frame()
    fill_frame(empty, [])
    assert empty == decode_pb2.Frame()


def test_a_token_in_the_middle_of_a_request_is_a_row() -> None:
    request = make_request(1, 3, num_output=1)
    request.row_id = 7
    news = StepNews()
    for token_id in (50, 51, 52):
        request.request.output_token_ids.append(token_id)
        reason = FinishReason.LENGTH if token_id == 52 else None
        tell_tokens(news, request, [SampledToken(token_id)], reason)
    (deltas,) = news.take().values()
    assert [delta.is_row for delta in deltas] == [False, True, False]
    assert (deltas[1].row_id, deltas[1].start_index, deltas[1].token_ids) == (7, 2, (51,))


def test_a_router_that_reads_no_rows_gets_deltas() -> None:
    frame = decode_pb2.Frame()
    fill_frame(frame, deltas_of([("d", "tokens", 1)]))
    assert [delta.request_id for delta in frame.deltas] == ["d"]
    assert not frame.HasField("rows")
