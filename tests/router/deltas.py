"""The news of a fake decode rank, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from runtime.pb import common_pb2, decode_pb2, registry_pb2
from runtime.rpc.wire import error_to_proto

if TYPE_CHECKING:
    from tests.router.fakes import FakeDecode
    from tests.router.outputs import Tokens


def delta_of(
    decode: FakeDecode, request: decode_pb2.ReserveRequest, tokens: Tokens, index: int
) -> decode_pb2.TokenDelta:
    """The news of one step."""
    if index == decode.fail_after or decode.fails_always:
        error = error_to_proto(decode.fail_error, request.request_id)
        delta = error_delta(request.request_id, error)
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


def joined(deltas: list[decode_pb2.TokenDelta], num_drafts: int) -> list[decode_pb2.TokenDelta]:
    """The news of one step that verified drafts, if it did; an error stands alone."""
    if not num_drafts or deltas[-1].HasField("error"):
        return deltas if not num_drafts else deltas[-1:]
    whole = decode_pb2.TokenDelta()
    for delta in deltas:
        whole.MergeFrom(delta)
    whole.start_index = deltas[0].start_index
    whole.num_drafts = num_drafts
    return [whole]


def frame_of(
    decode: FakeDecode,
    deltas: Iterable[decode_pb2.TokenDelta],
    load: registry_pb2.WorkerLoad | None = None,
) -> decode_pb2.Frame:
    """``deltas`` as a decode rank sends them: what says tokens alone is a row, if it may be one."""
    frame = decode_pb2.Frame(decode=decode.identity, load=load)
    row_ids = {request.request_id: request.row_id for request in decode.seen if decode.sends_rows}
    told, sizes, drafts = set(), [], []
    for delta in deltas:
        row_id = row_ids.get(delta.request_id, 0)
        says = {field.name for field, _ in delta.ListFields()}
        is_row = says - {"num_drafts"} == {"request_id", "start_index", "token_ids"}
        if row_id and is_row and row_id not in told:
            frame.rows.row_ids.append(row_id)
            frame.rows.start_indexes.append(delta.start_index)
            frame.rows.token_ids.extend(delta.token_ids)
            sizes.append(len(delta.token_ids))
            drafts.append(delta.num_drafts)
        else:
            told.add(row_id)
            frame.deltas.append(delta)
    if any(size != 1 for size in sizes):
        frame.rows.num_tokens.extend(sizes)
    if any(drafts):
        frame.rows.num_drafts.extend(drafts)
    return frame


def error_delta(request_id: str, error: common_pb2.Error) -> decode_pb2.TokenDelta:
    """A request ends with ``error``."""
    return decode_pb2.TokenDelta(
        request_id=request_id, finish_reason=common_pb2.FINISH_REASON_ERROR, error=error
    )


def since(deltas: Iterable[decode_pb2.TokenDelta], next_index: int) -> list[decode_pb2.TokenDelta]:
    """Those that say something from ``next_index`` on."""
    return [
        delta
        for delta in deltas
        if delta.start_index + len(delta.token_ids) > next_index or delta.finish_reason
    ]


def tell_load(decode: FakeDecode) -> None:
    """A frame to all routers that has no news but the load, with claims that wait for blocks."""
    is_blocked = decode.blocks is not None and not decode.blocks.is_set()
    load = registry_pb2.WorkerLoad(
        num_requests_waiting=len(decode.requests),
        num_requests_blocked=len(decode.requests) if is_blocked else 0,
        num_free_blocks=10,
        num_total_blocks=10,
    )
    for frames in decode._streams.values():
        frames.put_nowait(decode_pb2.Frame(decode=decode.identity, load=load))


def position_logprobs(token_id: int, count: int) -> common_pb2.PositionLogprobs:
    """A made-up distribution in which ``token_id`` is the best."""
    return common_pb2.PositionLogprobs(
        logprob=-0.5,
        top_ids=[token_id + i for i in range(count)],
        top_logprobs=[-0.5 - i for i in range(count)],
    )
