"""Trace context: headers that are read and written, and the task that it belongs to."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.trace import TraceContext, current_trace, trace_id, use_trace

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
