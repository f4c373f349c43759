"""Channels outlive leases: what is under way on them ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from router.pool.members import Member, Role, WorkerKey
from router.requests.clients import WorkerClients
from runtime.net.credentials import Listen
from runtime.pb import common_pb2, prefill_pb2, prefill_pb2_grpc
from runtime.rpc.grpc_calls import bind_port, create_server
from tests.router.conftest import ANSWER, MODEL, StartRouter
from tests.router.fakes import CREDENTIALS
from tests.waiting import until


class SlowPrefill(prefill_pb2_grpc.PrefillServicer):
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.num_running = 0
        self.answer = asyncio.Event()

    async def Run(
        self, request: prefill_pb2.RunRequest, context: object
    ) -> prefill_pb2.RunResponse:
        self.num_running += 1
        await self.answer.wait()
        return prefill_pb2.RunResponse(first_token=prefill_pb2.FirstToken(token_id=7))


@pytest.fixture
async def served() -> AsyncIterator[tuple[SlowPrefill, Member]]:
    worker, server = SlowPrefill(), create_server(CREDENTIALS)
    prefill_pb2_grpc.add_PrefillServicer_to_server(worker, server)
    member = Member(
        key=WorkerKey("prefill-0", 1, 0),
        role=Role.PREFILL,
        address=f"127.0.0.1:{bind_port(server, Listen(bind='127.0.0.1'), CREDENTIALS)}",
        num_ranks=1,
        model="m",
        max_model_len=100,
        layout_fingerprint="l",
        transport="loopback",
    )
    await server.start()
    yield worker, member
    await server.stop(None)


async def until_num_channels(clients: WorkerClients, number: int) -> None:
    async with asyncio.timeout(60):
        while clients.num_channels != number:
            await asyncio.sleep(0.01)


async def running(clients: WorkerClients, worker: SlowPrefill, member: Member) -> asyncio.Task[int]:
    async def run() -> int:
        response = await clients.prefill(member).Run(prefill_pb2.RunRequest(), timeout=60)
        return response.first_token.token_id

    task = asyncio.create_task(run())
    async with asyncio.timeout(60):
        while not worker.num_running:
            await asyncio.sleep(0.01)
    return task


async def test_a_channel_with_calls_is_closed_behind_the_last_of_them(served) -> None:
    worker, member = served
    clients = WorkerClients(CREDENTIALS)
    task = await running(clients, worker, member)
    replaced = replace(member, key=WorkerKey("prefill-0", 2, 0))
    clients.prefill(replaced)
    clients.retain({replaced.key})
    assert clients.num_channels == 2
    worker.answer.set()
    assert await task == 7
    await until_num_channels(clients, 1)
    clients.retain(())
    assert clients.num_channels == 0  # nothing is on it
    await clients.close()


async def test_a_member_that_comes_back_keeps_its_channel(served) -> None:
    worker, member = served
    clients = WorkerClients(CREDENTIALS)
    task = await running(clients, worker, member)
    clients.retain(())
    clients.retain({member.key})
    worker.answer.set()
    assert await task == 7
    assert clients.num_channels == 1
    await clients.close()


async def test_a_cancelled_call_lets_its_channel_go(served) -> None:
    worker, member = served
    clients = WorkerClients(CREDENTIALS)
    task = await running(clients, worker, member)
    clients.retain(())
    task.cancel()
    await until_num_channels(clients, 0)
    await clients.close()


@pytest.mark.slow
async def test_a_lease_that_ran_out_cuts_no_prefill(start_router: StartRouter) -> None:
    import openai

    cluster = await start_router(lease_ttl_s=2.0)
    prefill = await cluster.add_prefill()
    await cluster.add_decode()
    await until(lambda: cluster.decode.num_streams > 0)
    prefill.run_s = 10.0
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
    ) as client:
        request = client.completions.create(model=MODEL, prompt="x", max_tokens=100)
        answer = asyncio.create_task(request)
        await until(lambda: len(prefill.seen) == 1)
        prefill.fall_silent()
        pool = cluster.service._http.backends.default.pool
        await until(lambda: not pool.members(Role.PREFILL))
        await asyncio.sleep(1.0)  # its channel was to be closed by now
        await prefill.join(cluster.control, common_pb2.ROLE_PREFILL)
        assert (await answer).choices[0].text == ANSWER
    assert len(prefill.seen) == 1
