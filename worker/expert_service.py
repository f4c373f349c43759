"""The gRPC face of a rank's experts: what they get, window by window, while somebody records."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc.aio
import numpy as np

from experts.balance import Table
from experts.windows import LoadWindow
from runtime.pb import common_pb2, experts_pb2, experts_pb2_grpc
from worker.arguments import WorkerOptions
from worker.expert_load import ExpertLoadFeed

POLL_S = 0.2
"""A window that ends without a step behind it is looked for so often."""

RecordContext = grpc.aio.ServicerContext[experts_pb2.RecordRequest, experts_pb2.RecordFrame]

_ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}


def add_experts(
    server: grpc.aio.Server,
    identity: common_pb2.WorkerIdentity,
    options: WorkerOptions,
    feed: ExpertLoadFeed | None,
) -> None:
    """Serve a rank's experts beside all else that it serves."""
    service = ExpertsService(identity, options, feed)
    experts_pb2_grpc.add_ExpertsServicer_to_server(service, server)


class ExpertsService(experts_pb2_grpc.ExpertsServicer):
    """Serves one rank."""

    def __init__(
        self,
        identity: common_pb2.WorkerIdentity,
        options: WorkerOptions,
        feed: ExpertLoadFeed | None,
    ) -> None:
        """`feed` is None for a dense model."""
        self._identity, self._options, self._feed = identity, options, feed

    async def Record(
        self, request: experts_pb2.RecordRequest, context: RecordContext
    ) -> AsyncIterator[experts_pb2.RecordFrame]:
        """See experts.proto."""
        every, num_windows = request.passes_per_window, request.num_windows
        if every < 1:
            text = "passes_per_window is 0. Fix: 1 or more"
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        feed = self._feed
        if feed is None:
            text = f"the model {self._options.served_name!r} has no experts: nothing to record"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        with feed.follow(every) as windows:
            told = feed.experts.placements.table
            yield experts_pb2.RecordFrame(model=self._model(feed, told))
            num_told = 0
            while not num_windows or num_told < num_windows:
                window = await windows.next(POLL_S)
                if window is None:
                    feed.deliver()
                    continue
                if windows.is_behind:
                    text = "windows are read too slowly. Fix: more passes a window"
                    await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
                num_told += 1
                frame = experts_pb2.RecordFrame(window=_window(window))
                table = feed.experts.placements.table
                if table != told:
                    frame.window.placement, told = _bytes_of(table), table
                yield frame

    def _model(self, feed: ExpertLoadFeed, table: Table) -> experts_pb2.ExpertModel:
        experts, counter, config = feed.experts, feed.experts.counter, feed.experts.config
        section = self._options.section
        return experts_pb2.ExpertModel(
            worker=self._identity,
            role=_ROLES[self._options.role],
            name=self._options.served_name,
            layers=counter.layers,
            num_experts=counter.num_experts,
            top_k=counter.top_k,
            num_groups=config.n_group,
            topk_group=config.topk_group,
            hidden_size=config.hidden_size,
            moe_intermediate_size=config.moe_intermediate_size,
            expert_bytes=experts.expert_bytes,
            num_draft_layers=experts.num_draft_layers,
            num_ranks=experts.num_ranks,
            num_endpoints=section.num_endpoints,
            num_slots=experts.placements.num_physical_experts,
            placement=_bytes_of(table),
        )


def _bytes_of(table: Table) -> bytes:
    return np.array(table, dtype="<i4").tobytes()


def _window(window: LoadWindow) -> experts_pb2.LoadWindow:
    return experts_pb2.LoadWindow(
        first_pass=window.first_pass,
        end_pass=window.end_pass,
        counts=window.counts_LE.astype("<i8").tobytes(),
    )


async def _refuse(
    context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, text: str
) -> NoReturn:
    await context.abort(code, text)
    raise AssertionError("an aborted call goes on")
