"""``GET /experts`` records for as long as the request lasts, and says what cannot be recorded."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request

from engine.experts.placements import ExpertPlacements
from router.errors import RecordingError, RequestError
from router.http.experts import MAX_ROWS, Asked, ExpertRecordings
from router.pool.members import Role, WorkerKey
from tests.router.conftest import Cluster
from tests.worker.counted_rank import CREDENTIALS, EXPERTS, Rank, listening, make_experts


@pytest.fixture
def ranks(tmp_path: Path) -> list[Rank]:
    return [Rank(make_experts(tmp_path / str(number))) for number in range(2)]


@contextlib.asynccontextmanager
async def recordings_of(ranks: list[Rank]) -> AsyncIterator[ExpertRecordings]:
    """Of both."""
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


@pytest.fixture
async def recordings(ranks: list[Rank]) -> AsyncIterator[ExpertRecordings]:
    async with recordings_of(ranks) as recordings:
        yield recordings


async def answer(
    recordings: ExpertRecordings,
    query: str,
    ranks: list[Rank],
    meanwhile: Callable[[], None] = lambda: None,
) -> Any:
    """What is said of steps that run once all ranks are followed, and of what is done then."""
    asking = asyncio.ensure_future(
        recordings.answer(make_mocked_request("GET", f"/experts?{query}"))
    )
    while not asking.done() and not all(rank.num_followers for rank in ranks):
        await asyncio.sleep(0.01)
    meanwhile()
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
    assert told["rank_load"][0]["times_mean"] == [[1.0], [1.0]]
    for _ in range(100):
        if not any(rank.num_followers for rank in ranks):
            break
        await asyncio.sleep(0.02)
    assert not any(rank.num_followers for rank in ranks), "nothing stays switched on"


@pytest.mark.parametrize("moves", [False, True])
async def test_it_says_where_the_rows_went(tmp_path: Path, moves: bool) -> None:
    """Nine slots of three ranks: the eight experts, which cannot be dealt evenly, and a copy."""
    placements = ExpertPlacements.alike(
        [*range(EXPERTS), 0], EXPERTS, layers=range(1, 3), can_change=True
    )
    ranks = [
        Rank(replace(make_experts(tmp_path / name), placements=placements, num_ranks=3))
        for name in ("0", "1")
    ]

    def move() -> None:
        if moves:  # experts 0 and 3 of the second layer change places
            placements.move([(1, 0, 3), (1, 3, 0)])

    async with recordings_of(ranks) as recordings:
        told = json.loads((await answer(recordings, "passes=2", ranks, move)).body)
    (load,) = told["rank_load"]
    assert (load["instance"], load["layers"]) == ("decode-0", [1, 2])
    second = [3.0, 0.0, 0.0] if moves else [0.0, 3.0, 0.0]
    assert load["times_mean"] == [[1.125, 0.0, 1.875], second]
    assert load["now"]["worst_layer"] == pytest.approx(1 / 3)
    assert 0 < load["floor"]["overall"] <= 1
    assert "now" not in told, "there is no order to hold eight experts on three ranks in"


async def test_steps_of_nobody_say_nothing(recordings: ExpertRecordings, ranks: list[Rank]) -> None:
    asking = asyncio.ensure_future(
        recordings.answer(make_mocked_request("GET", "/experts?passes=1"))
    )
    while not all(rank.num_followers for rank in ranks):
        await asyncio.sleep(0.01)
    for rank in ranks:
        rank.step({})
    with pytest.raises(RecordingError, match="no step had a token"):
        await asking


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
