"""A trace becomes spans with the right stages, and times of unions."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine.stages import format_table, summarise
from bench.engine.trace import (
    Event,
    Span,
    SpanKind,
    busy,
    gaps,
    read_spans,
    short_name,
    stage_names,
    union,
)


def ranged(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    return {"cat": "user_annotation", "name": name, "ts": ts, "dur": dur, "tid": tid}


def launch(correlation: int, ts: float, tid: int = 1, cat: str = "cuda_runtime") -> Event:
    arguments = {"correlation": correlation}
    return {"cat": cat, "name": "launch", "ts": ts, "dur": 1, "tid": tid, "args": arguments}


def kernel(name: str, correlation: int, ts: float, dur: float, cat: str = "kernel") -> Event:
    arguments = {"correlation": correlation, "stream": 7}
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7, "args": arguments}


def test_a_kernel_belongs_to_the_innermost_range_of_its_launch() -> None:
    events = [
        ranged("batch", 0, 100),
        ranged("outer", 10, 40),
        ranged("inner", 20, 10),
        ranged("elsewhere", 0, 100, tid=2),
        launch(1, 15),
        launch(2, 25, cat="cuda_driver"),
        launch(3, 35),
        launch(4, 60),
        launch(5, 120),
        kernel("a", 1, 200, 5),
        kernel("b", 2, 205, 5),
        kernel("ncclDevKernel_AllGather(int)", 3, 206, 10),
        kernel("void at::native::add<float, x<int>>(float)", 4, 220, 5, cat="gpu_memcpy"),
        kernel("late", 5, 300, 5),
    ]
    spans = read_spans(events, "batch")
    assert [span.stage for span in spans] == ["outer", "inner", "outer", "at::native::add"]
    assert [span.kind for span in spans] == [*[SpanKind.COMPUTE] * 2, SpanKind.TRAFFIC, "compute"]
    assert (spans[1].start, spans[1].end, spans[1].stream) == (205, 210, 7)


def test_kernels_of_a_graph_take_the_names_of_an_earlier_run() -> None:
    events = [
        ranged("named", 0, 10),
        ranged("norm", 1, 1),
        ranged("product", 3, 1),
        launch(1, 1.5),
        launch(2, 3.5),
        launch(3, 3.6),
        launch(4, 5),
        kernel("f<1>(int)", 1, 2, 1),
        kernel("g<1>", 2, 4, 1),
        kernel("f<2>", 3, 5, 1),
        kernel("shared", 4, 6, 1),
        ranged("measured", 20, 10),
        launch(9, 21),
        kernel("f<1>(int)", 9, 22, 1),
        kernel("f<2>", 9, 23, 1),
        kernel("new<3>", 9, 24, 1),
    ]
    names = stage_names(read_spans(events, "named"))
    assert names == {"f<1>(int)": "norm", "g<1>": "product", "f<2>": "product", "shared": "shared"}
    spans = read_spans(events, "measured", names)
    assert [span.stage for span in spans] == ["norm", "product", "new"]
    twice = [Span(stage=s, kernel="k", kind=SpanKind.COMPUTE, start=0, end=1) for s in "ab"]
    assert stage_names(twice) == {}


def test_ranges_are_the_spans_where_there_is_no_device() -> None:
    events = [
        ranged("ranks: all_gather", 5, 3),
        ranged("gloo:all_gather", 4, 1),
        ranged("batch", 0, 10),
        ranged("norm", 1, 2),
        ranged("inside norm", 1, 1),
    ]
    spans = read_spans(events, "batch")
    assert [(span.stage, str(span.kind)) for span in spans] == [
        ("norm", "compute"),
        ("ranks: all_gather", "traffic"),
    ]
    with pytest.raises(ValueError, match="no range 'other'"):
        read_spans(events, "other")


def test_names_are_shortened() -> None:
    assert short_name("void deep_gemm::gemm<128u, cute<1, 2>>(int, float*)") == "deep_gemm::gemm"
    assert short_name("Memcpy DtoH (Device -> Pinned)") == "Memcpy DtoH"
    assert len(short_name("x" * 100)) == 60


SPANS = st.lists(
    st.builds(
        lambda start, length, is_traffic: Span(
            stage=f"s{start % 3}",
            kind=SpanKind.TRAFFIC if is_traffic else SpanKind.COMPUTE,
            start=start,
            end=start + length,
        ),
        st.integers(0, 50),
        st.integers(0, 10),
        st.booleans(),
    ),
    min_size=1,
    max_size=20,
).map(lambda spans: sorted(spans, key=lambda span: span.start))


@given(spans=SPANS)
def test_times_are_those_of_counting_ticks(spans: list[Span]) -> None:
    def ticks(chosen: list[Span]) -> set[int]:
        return {tick for span in chosen for tick in range(int(span.start), int(span.end))}

    window = ticks([Span(stage="", kind=SpanKind.COMPUTE, start=spans[0].start,
                         end=max(span.end for span in spans))])  # fmt: skip
    compute = ticks([span for span in spans if span.kind is SpanKind.COMPUTE])
    traffic = ticks([span for span in spans if span.kind is SpanKind.TRAFFIC])
    assert busy(spans) == len(compute | traffic)
    assert sum(gap.end - gap.start for gap in gaps(spans)) == len(window - compute - traffic)
    merged = union((span.start, span.end) for span in spans)
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    profile = summarise(spans, {"s0": 1e-6})
    assert profile.exposed_traffic_ms == pytest.approx(len(traffic - compute) / 1e3)
    assert profile.idle_ms == pytest.approx(len(window - compute - traffic) / 1e3, abs=1e-9)
    assert sum(row.calls for row in profile.stages) == len(spans)
    assert len(format_table(profile).splitlines()) == 2 + len(profile.stages) + len(
        profile.longest_gaps
    )


def test_a_gap_names_its_neighbours() -> None:
    spans = [
        Span(stage="long", kind=SpanKind.COMPUTE, start=0, end=10),
        Span(stage="short", kind=SpanKind.COMPUTE, start=2, end=4),
        Span(stage="next", kind=SpanKind.COMPUTE, start=12, end=13),
        Span(stage="last", kind=SpanKind.COMPUTE, start=20, end=21),
    ]
    assert [(gap.after, gap.before) for gap in gaps(spans)] == [("next", "last"), ("long", "next")]
