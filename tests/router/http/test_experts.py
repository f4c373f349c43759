"""``GET /experts`` records for as long as the request lasts, and says what cannot be recorded."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request

from router.errors import RecordingError, RequestError
from router.http.experts import MAX_ROWS, Asked, ExpertRecordings
from router.pool.members import Role, WorkerKey
from tests.router.conftest import Cluster
from tests.worker.counted_rank import CREDENTIALS, Rank, listening, make_experts


@pytest.fixture
def ranks(tmp_path: Path) -> list[Rank]:
    return [Rank(make_experts(tmp_path / str(number))) for number in range(2)]


@pytest.fixture
async def recordings(ranks: list[Rank]) -> AsyncIterator[ExpertRecordings]:
    async with listening(ranks[0].feed) as first, listening(ranks[1].feed) as second:
        members = [
            SimpleNamespace(
                key=WorkerKey("decode-0", 7, number),
                role=Role.DECODE,
                address=address,
                model="tiny",
            )
            for number, address in enumerate((first, second))
        ]
        backends = SimpleNamespace(members=lambda: members)
        serving: Any = SimpleNamespace(backends=backends, credentials=CREDENTIALS)
        yield ExpertRecordings(serving)


async def answer(recordings: ExpertRecordings, query: str, ranks: list[Rank]) -> Any:
    """What is said of steps that run once all ranks are followed."""
    asking = asyncio.ensure_future(
        recordings.answer(make_mocked_request("GET", f"/experts?{query}"))
    )
    while not asking.done() and not all(rank.num_followers for rank in ranks):
        await asyncio.sleep(0.01)
    for _ in range(4):
        for rank in ranks:
            rank.step({(1, 0): 6, (1, 7): 2, (2, 3): 8})
    return await asking


async def test_it_says_how_even_ranks_are(recordings: ExpertRecordings, ranks: list[Rank]) -> None:
    told = json.loads((await answer(recordings, "passes=3", ranks)).body)
    assert (told["role"], told["model"], told["rows"], told["passes_per_row"]) == (
        "decode", "tiny", 3, 1,
    )  # fmt: skip
    assert told["hottest"][0]["tokens"] == 48
    assert told["now"]["overall"] == 1.0, "one rank holds all"
    for _ in range(100):
        if not any(rank.num_followers for rank in ranks):
            break
        await asyncio.sleep(0.02)
    assert not any(rank.num_followers for rank in ranks), "nothing stays switched on"


async def test_a_trace_is_what_tandem_reads(
    recordings: ExpertRecordings, ranks: list[Rank], tmp_path: Path
) -> None:
    response = await answer(recordings, "passes=2&format=npz", ranks)
    assert "decode.npz" in response.headers["Content-Disposition"]
    with np.load(io.BytesIO(response.body), allow_pickle=False) as content:
        assert content["counts"].shape[0] == 2
        assert content["counts"][:, 0, 0].tolist() == [12, 12]


async def test_one_at_a_time(recordings: ExpertRecordings, ranks: list[Rank]) -> None:
    first = asyncio.ensure_future(answer(recordings, "passes=1", ranks))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(RecordingError, match="another recording"):
        await recordings.answer(make_mocked_request("GET", "/experts"))
    await first
    assert await answer(recordings, "passes=1", ranks), "and then the next"


async def test_nothing_to_record_is_said(recordings: ExpertRecordings) -> None:
    with pytest.raises(RecordingError, match=r"no step was made in 0\.2 s"):
        await recordings.answer(make_mocked_request("GET", "/experts?seconds=0.2"))
    for query in ("role=prefill", "worker=decode-3", "model=other"):
        with pytest.raises(RecordingError, match="GET /status"):
            await recordings.answer(make_mocked_request("GET", f"/experts?{query}"))


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"role": "router"}, "role"),
        ({"passes": "0"}, "passes"),
        ({"passes": "many"}, "passes"),
        ({"passes": "99999"}, "passes"),
        ({"seconds": "nan"}, "seconds"),
        ({"format": "xml"}, "format"),
    ],
)
def test_what_cannot_be_is_refused_by_name(query: dict[str, str], param: str) -> None:
    with pytest.raises(RequestError, match="Fix") as caught:
        Asked.of(query)
    assert caught.value.param == param


@pytest.mark.parametrize("passes", [1, 256, 257, 2048])
def test_a_process_keeps_so_many_rows_at_most(passes: int) -> None:
    size = -(-Asked.of({"passes": str(passes)}).passes // MAX_ROWS)
    assert passes // size <= MAX_ROWS


async def test_workers_without_experts_are_a_conflict(cluster: Cluster, http: Any) -> None:
    async with http.get("/experts?role=decode&seconds=0.5") as response:
        assert response.status == 409
        assert "decode-0/0 cannot be recorded" in (await response.json())["error"]["message"]
