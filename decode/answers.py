"""What a request tells its router: turns the events of its life into deltas. Decides nothing.

The first delta and the last carry the timings. A request whose first token ended it, which prefill
has told, ends silently: that delta is for our own books.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode.frames import Delta, StepNews
from decode.requests import DecodeRequest
from engine.sampling.inputs import SampledToken
from runtime.errors import TandemError
from runtime.pb import common_pb2
from runtime.sampling import FinishReason


def _timings(request: DecodeRequest) -> common_pb2.Timings:
    copy = common_pb2.Timings()
    copy.CopyFrom(request.timings)
    if request.request.matcher is not None:
        copy.mask_cpu_s = request.request.matcher.cpu_s
    return copy


def tell_tokens(
    news: StepNews,
    request: DecodeRequest,
    tokens: Sequence[SampledToken],
    reason: FinishReason | None,
    num_drafts: int = 0,
) -> None:
    """The latest output tokens of a request, by a step that verified so many drafts for it.

    `reason`: why they end the request, if they do.
    """
    inner = request.request
    with_timings = reason is not None or not request.has_news
    request.has_news = True
    delta = Delta(
        request_id=request.request_id,
        row_id=request.row_id,
        start_index=inner.num_output_tokens - len(tokens),
        token_ids=tuple(token.token_id for token in tokens),
        logprobs=tuple(token.logprobs for token in tokens if token.logprobs is not None),
        finish_reason=reason,
        timings=_timings(request) if with_timings else None,
        num_cached_tokens=inner.num_cached_tokens,
        num_drafts=num_drafts,
    )
    news.add(request.router_id, delta)


def tell_end(
    news: StepNews, request: DecodeRequest, reason: FinishReason, error: TandemError
) -> None:
    """The request ends early."""
    error.request_id = error.request_id or request.request_id
    delta = Delta(
        request_id=request.request_id,
        # The prefill worker's token has its index also where it never arrived here.
        start_index=max(request.request.num_output_tokens, request.first_index + 1),
        finish_reason=reason,
        error=error,
        timings=_timings(request),
        num_cached_tokens=request.request.num_cached_tokens,
    )
    news.add(request.router_id, delta)


def tell_silent_end(news: StepNews, request: DecodeRequest, reason: FinishReason) -> None:
    """The request is over, and nobody has to be told."""
    delta = Delta(
        request_id=request.request_id,
        start_index=request.first_index + 1,
        finish_reason=reason,
        is_silent=True,
    )
    news.add(request.router_id, delta)
