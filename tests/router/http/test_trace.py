"""One trace from the client's header to the workers' handlers."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.router.conftest import MODEL, Cluster
from tests.waiting import until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 4}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}


async def test_a_clients_trace_reaches_both_workers(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    async with http.post("/v1/completions", json=BODY, headers=HEADERS) as response:
        assert response.status == 200
        assert "traceparent" not in response.headers
    assert cluster.prefill.traces == [("Run", TRACE)]
    assert cluster.decode.traces == [("Frames", ""), ("Reserve", TRACE)]


async def test_the_end_of_a_request_is_of_its_trace(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    cluster.decode.hold_after = 3
    body = {**BODY, "max_tokens": 100}
    task = asyncio.create_task(http.post("/v1/completions", json=body, headers=HEADERS))
    await until(lambda: any(r.sent for r in cluster.decode.requests.values()))
    task.cancel()
    await until(lambda: bool(cluster.decode.aborted))
    assert cluster.decode.traces[-1] == ("Abort", TRACE)


async def test_requests_of_one_connection_have_traces_of_their_own(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    for headers in (HEADERS, {}, {"traceparent": "nonsense"}):
        async with http.post("/v1/completions", json=BODY, headers=headers) as response:
            assert response.status == 200
    traces = [trace for _, trace in cluster.prefill.traces]
    assert traces[0] == TRACE
    assert all(len(trace) == 32 for trace in traces)
    assert len(set(traces)) == 3


async def test_a_stream_of_tokens_that_a_request_opens_is_of_no_trace(
    http: aiohttp.ClientSession, cluster: Cluster
) -> None:
    frames = cluster.service._http.backends.default._workers.frames  # type: ignore[union-attr]
    (stream,) = frames._streams.values()
    frames._streams.clear()
    async with http.post("/v1/completions", json=BODY, headers=HEADERS) as response:
        assert response.status == 200
    await stream.close("it was lost")
    assert [trace for call, trace in cluster.decode.traces if call == "Frames"] == ["", ""]
