"""What moves when a step or a loop ends, and how often: the router's rule, on what workers say."""

from __future__ import annotations

import aiohttp
import pytest

from router.requests.pipeline import MAX_SUSPICIONS
from runtime.errors import DeviceError, InternalError, PeerLostError, TandemError
from tests.router.conftest import ANSWER, MODEL, Cluster, StartRouter
from tests.waiting import until
from worker.endings import RankName, failure_of_requests
from worker.watchdog import StepOverdueError

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}
ALONE = RankName(instance="worker-0")
OF_GROUP = RankName(instance="worker-0", rank=1, num_ranks=2)
HANGS = StepOverdueError("a step did not end within 30 s")
DEVICE = DeviceError("RuntimeError: CUDA error: an illegal memory access was encountered")
BUG = InternalError("ZeroDivisionError: division by zero")
LOST = PeerLostError("another rank was lost in a collective")
MAX_MOVES = 2
SUSPECT, FREE, NEVER = MAX_SUSPICIONS, MAX_MOVES, 0

ENDINGS: dict[str, tuple[TandemError, int]] = {
    "in a step that hangs": (failure_of_requests(ALONE, HANGS, in_step=True), SUSPECT),
    "beside a step that hangs": (failure_of_requests(ALONE, HANGS, in_step=False), FREE),
    "in a collective that hangs": (failure_of_requests(OF_GROUP, HANGS, in_step=True), SUSPECT),
    "beside one": (failure_of_requests(OF_GROUP, HANGS, in_step=False), FREE),
    "on a device that fails": (failure_of_requests(OF_GROUP, DEVICE, in_step=True), SUSPECT),
    "beside that": (failure_of_requests(ALONE, DEVICE, in_step=False), FREE),
    "by a bug": (failure_of_requests(ALONE, BUG, in_step=False), SUSPECT),
    "another rank is lost": (failure_of_requests(OF_GROUP, LOST, in_step=True), FREE),
    "an order to stop": (failure_of_requests(ALONE, None, in_step=True), FREE),
    # As `StepError.answer` says it.
    "a step that fails": (InternalError("its step failed: no memory", suspect=True), SUSPECT),
    "a step that this request failed": (InternalError("its step failed: its grammar"), NEVER),
}


@pytest.fixture
async def cluster(start_router: StartRouter) -> Cluster:
    """More workers of each role than any request may go to."""
    cluster = await start_router(max_migrations=MAX_MOVES)
    for number in range(MAX_MOVES + 2):
        await cluster.add_prefill(f"prefill-{number}")
        await cluster.add_decode(f"decode-{number}")
    await until(lambda: all(decode.num_streams > 0 for decode in cluster.decodes))
    return cluster


def fail(cluster: Cluster, role: str, error: TandemError | None, num_workers: int) -> None:
    """Have so many workers of a role end each of their requests so: decode's after 3 tokens."""
    for prefill in cluster.prefills:
        prefill.seen.clear()
    for decode in cluster.decodes:
        decode.seen.clear()
    if role == "prefill":
        for prefill in cluster.prefills[:num_workers]:
            prefill.run_error = error
        return
    for decode in cluster.decodes[:num_workers]:
        decode.fail_error, decode.fails_always = error, error is not None
        decode.fail_after = 3 if error is not None else 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_every_ending_moves_what_it_may(cluster: Cluster, role: str) -> None:
    workers = cluster.prefills if role == "prefill" else cluster.decodes
    async with aiohttp.ClientSession(cluster.url) as http:
        for name, (error, num_moves) in ENDINGS.items():
            # All workers of the role fall to it: so many are let down, and no more.
            fail(cluster, role, error, len(workers))
            async with http.post("/v1/completions", json=BODY) as response:
                body = await response.json()
                assert response.status >= 500, name
            assert body["error"]["message"] == error.message, name
            assert sum(len(worker.seen) for worker in workers) == 1 + num_moves, name
            # As many fall as may: the next one has the whole answer.
            fail(cluster, role, None, len(workers))
            fail(cluster, role, error, num_moves)
            async with http.post("/v1/completions", json=BODY) as response:
                body = await response.json()
            assert body["choices"][0]["text"] == ANSWER, name
            fail(cluster, role, None, len(workers))
