"""Trace context: headers that are read and written, and the task that it belongs to."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.logging import configure_logging, get_logger
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc.grpc_calls import open_channel
from runtime.trace.context import TraceContext, current_trace, trace_id, use_trace, without_trace
from tests.runtime.rpc.fake_registry import RIGHT, FakeRegistry, serve

HEX = "0123456789abcdef"


@given(
    trace=st.text(HEX, min_size=32, max_size=32).filter(lambda text: int(text, 16) > 0),
    span=st.text(HEX, min_size=16, max_size=16).filter(lambda text: int(text, 16) > 0),
    is_sampled=st.booleans(),
)
def test_a_header_is_read_back_as_written(trace: str, span: str, is_sampled: bool) -> None:
    context = TraceContext(trace, span, is_sampled)
    assert TraceContext.parse(context.header) == context


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-abc-def-01",
        f"00-{'0' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
        f"ff-{'1' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'1' * 16}-01-more",
        f"00-{'A' * 32}-{'1' * 16}-01",
    ],
)
def test_what_is_no_header_is_nobodys_trace(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_a_later_version_may_say_more() -> None:
    assert TraceContext.parse(f"01-{'1' * 32}-{'2' * 16}-01-more") is not None


def test_a_child_is_of_the_same_trace() -> None:
    parent = TraceContext.begin()
    child = parent.child()
    assert child.trace_id == parent.trace_id
    assert child.span_id != parent.span_id


async def test_tasks_have_their_own() -> None:
    async def serve(trace: TraceContext) -> str:
        with use_trace(trace):
            await asyncio.sleep(0)
            return trace_id()

    traces = [TraceContext.begin() for _ in range(8)]
    found = await asyncio.gather(*(serve(trace) for trace in traces))
    assert found == [trace.trace_id for trace in traces]
    assert current_trace() is None


async def test_what_goes_on_for_others_has_none() -> None:
    async def serve() -> str:
        return trace_id()

    loop = asyncio.get_running_loop()
    with use_trace(TraceContext.begin()):
        assert await loop.create_task(serve()) == trace_id()
        assert await loop.create_task(serve(), context=without_trace()) == ""


async def test_a_line_that_a_called_handler_logs_ends_in_the_callers_trace() -> None:
    """And one that is logged elsewhere does not."""
    stream, root = io.StringIO(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("test", stream=stream)

    class Telling(FakeRegistry):
        async def Renew(self, request, context):
            get_logger("handler").info("renewing")
            return await super().Renew(request, context)

    server, port = await serve(Telling())
    try:
        async with open_channel(f"127.0.0.1:{port}", RIGHT) as channel:
            stub = registry_pb2_grpc.RegistryStub(channel)
            with use_trace(TraceContext.begin()):
                expected = trace_id()
                await stub.Renew(registry_pb2.RenewRequest(lease_id="x"))
            await stub.Renew(registry_pb2.RenewRequest(lease_id="x"))
    finally:
        await server.stop(None)
        root.handlers[:] = handlers
        root.setLevel(level)
    first, second = [line for line in stream.getvalue().splitlines() if "renewing" in line]
    assert first.endswith(f"handler: renewing trace={expected}")
    assert second.endswith("handler: renewing")
