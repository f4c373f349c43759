"""Two data-parallel ranks with split experts: real processes, a real model, gloo."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from deploy.ports import free_port
from engine.boot.build import build_model
from engine.generate import generate
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from kv_transfer.layout import KVDtype, KVLayout
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
)
from runtime.config.file import SECRET_VARIABLE, dump_config
from runtime.net.credentials import Listen
from runtime.pb import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2_grpc, registry_pb2_grpc
from runtime.rpc.grpc_calls import bind_port, create_server, open_channel
from runtime.rpc.wire import sampling_to_proto
from runtime.sampling import SamplingParams
from tests.decode.cluster import CREDENTIALS, HOST, SECRET, FakePrefill, FakeRegistry, FakeRouter
from tests.engine.tiny import tiny_config, write_checkpoint
from tests.processes.forked import Process, start

BLOCK_SIZE = 16
NUM_RANKS = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Group:
    """The running ranks and what talks to them."""

    model: DeepseekV3ForCausalLM
    processes: list[Process]
    prefill: FakePrefill
    routers: list[FakeRouter]
    logs: list[Path]

    async def generate(
        self, rank: int, request_id: str, prompt: Sequence[int], count: int
    ) -> list[int]:
        """Greedy output of `count` tokens through one rank."""
        params = SamplingParams(temperature=0.0, max_tokens=count)
        request = decode_pb2.ReserveRequest(
            request_id=request_id,
            router_id=self.routers[rank].router_id,
            context_token_ids=prompt,
            sampling=sampling_to_proto(params),
            timeout_s=60.0,
            prefill=self.prefill.identity,
            prefill_address=self.prefill.address,
            num_prefill_ranks=self.prefill.num_ranks,
        )
        response = await self.routers[rank].stub.Reserve(request)
        ticket = await self.prefill.ticket(self.prefill.claim(response.reservation))
        first = self.prefill.run(ticket, prompt)
        return [first, *await self.routers[rank].tokens_of(request_id)]

    def oracle(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The same by the plain loop in one process."""
        params = SamplingParams(temperature=0.0, max_tokens=count)
        return [out.token_ids for out in generate(self.model, prompts, params)]


def prompt_of(seed: int, length: int) -> list[int]:
    return [2 + (seed * 131 + index * 17) % 120 for index in range(length)]


def layout_of(model: DeepseekV3ForCausalLM) -> KVLayout:
    return KVLayout(
        dtype=KVDtype.FLOAT32,
        block_size=BLOCK_SIZE,
        num_layers=model.config.num_kv_layers(with_mtp=False),
        head_width=model.config.latent_dim,
    )


def prefill_with(model: DeepseekV3ForCausalLM, layout: KVLayout) -> FakePrefill:
    """A prefill worker that computes with a real model, in this process."""

    def compute(pool: KVPool, blocks: Sequence[int], prompt: Sequence[int]) -> int:
        request = Request(
            request_id="prefill",
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(temperature=0.0),
            block_table=list(blocks),
        )
        runner = ModelRunner(model, pool, Sampler(model.config.vocab_size))
        sampled = runner.execute([ScheduledRequest(request, len(prompt))])[0].sampled
        assert sampled is not None
        return sampled.token_id

    return FakePrefill(layout=layout, compute=compute)


def start_rank(rank: int, rendezvous: str, router: str, folder: Path) -> Process:
    command = ["decode", "--config", str(folder / "cluster.toml")]
    command += ["--instance", "decode-0", "--rank", str(rank)]
    command += ["--rendezvous", rendezvous, "--router", router]
    environment = {**os.environ, SECRET_VARIABLE: SECRET, "OMP_NUM_THREADS": "1"}
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return start(command, environment=environment, output=log)


@contextlib.asynccontextmanager
async def run_group(folder: Path, overlap_steps: str) -> AsyncIterator[Group]:
    write_checkpoint(folder / "model", tiny_config(), seed=3)
    config = ClusterConfig(
        model=ModelSection(path=str(folder / "model")),
        prefill=PrefillSection(block_size=BLOCK_SIZE),
        decode=DecodeSection(
            dp=NUM_RANKS,
            num_blocks=64,
            block_size=BLOCK_SIZE,
            overlap_steps=overlap_steps,
            num_speculative_tokens=0,  # of which the fake prefill has no layer
        ),
        kv_transfer=KVTransferSection(transport="loopback"),  # which the fake prefill speaks
    )
    (folder / "cluster.toml").write_text(dump_config(config))
    model = build_model(folder / "model")
    prefill, registry = prefill_with(model, layout_of(model)), FakeRegistry()
    peers = create_server(CREDENTIALS)
    registry_pb2_grpc.add_RegistryServicer_to_server(registry, peers)
    prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, peers)
    prefill.address = f"{HOST}:{bind_port(peers, Listen(bind=HOST), CREDENTIALS)}"
    await peers.start()
    rendezvous = f"{HOST}:{free_port(HOST)}"
    processes = [start_rank(rank, rendezvous, prefill.address, folder) for rank in range(NUM_RANKS)]
    logs = [folder / f"rank-{rank}.log" for rank in range(NUM_RANKS)]
    channels: list[grpc.aio.Channel] = []
    readers: list[asyncio.Future[None]] = []
    try:
        async with asyncio.timeout(300):
            while len(registry.records) < NUM_RANKS:
                dead = [log for log, p in zip(logs, processes, strict=True) if p.poll() is not None]
                assert not dead, dead[0].read_text()
                await asyncio.sleep(0.05)
        assert len({record.identity.epoch for record in registry.records}) == 1
        routers = []
        for record in sorted(registry.records, key=lambda item: item.identity.rank):
            channels.append(open_channel(record.address, CREDENTIALS))
            stub = decode_pb2_grpc.DecodeStub(channels[-1])
            prefill.stubs[record.identity.rank] = stub
            routers.append(FakeRouter(stub))
            readers.append(asyncio.ensure_future(routers[-1].read()))
        yield Group(model, processes, prefill, routers, logs)
    finally:
        for process in processes:
            process.kill()
        await asyncio.gather(*readers, return_exceptions=True)
        for channel in channels:
            await channel.close(None)
        await asyncio.to_thread(prefill.stop)
        await peers.stop(None)
        for process in processes:
            process.wait(60)


@pytest.mark.parametrize("overlap_steps", ["off", "on"])
async def test_two_ranks_give_the_tokens_of_one_process_and_end_together(
    tmp_path: Path, overlap_steps: str
) -> None:
    async with run_group(tmp_path, overlap_steps) as group:
        # One rank works, the other runs dummy batches beside it.
        alone = prompt_of(1, 37)
        assert await group.generate(0, "alone", alone, 24) == group.oracle([alone], 24)[0]
        # Both work, on batches of different sizes.
        prompts = [prompt_of(seed, 20 + 7 * seed) for seed in range(6)]
        outputs = await asyncio.gather(
            *(
                group.generate(int(seed % 3 == 0), f"r{seed}", prompt, 20 + seed)
                for seed, prompt in enumerate(prompts)
            )
        )
        longest = group.oracle(prompts, 25)
        assert outputs == [tokens[: 20 + seed] for seed, tokens in enumerate(longest)]
        for process in group.processes:
            process.send_signal(signal.SIGTERM)
        for process, log in zip(group.processes, group.logs, strict=True):
            status = await asyncio.to_thread(process.wait, 60)
            assert status == 0, log.read_text()


async def test_a_rank_that_drains_alone_stays_and_one_that_stops_alone_takes_all_along_in_order(
    tmp_path: Path,
) -> None:
    async with run_group(tmp_path, "off") as group:
        drained = await group.routers[0].stub.Drain(
            common_pb2.DrainRequest(deadline_s=0.0), timeout=60
        )
        assert drained.num_requests_left == 0
        prompt = prompt_of(3, 30)
        assert await group.generate(1, "beside", prompt, 24) == group.oracle([prompt], 24)[0]

        running = asyncio.ensure_future(group.generate(1, "long", prompt, 400))
        while not group.routers[1].deltas.get("long"):
            await asyncio.sleep(0.01)
        group.processes[0].send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            last = (await group.routers[1].end_of("long"))[-1]
        running.cancel()
        is_given_back = last.error.code == common_pb2.ERROR_CODE_DRAINING
        assert is_given_back or last.finish_reason == common_pb2.FINISH_REASON_LENGTH
        for process, log in zip(group.processes, group.logs, strict=True):
            assert await asyncio.to_thread(process.wait, 60) == 0, log.read_text()


@pytest.mark.parametrize("overlap_steps", ["off", "on"])
async def test_the_death_of_a_rank_fails_the_others_within_seconds(
    tmp_path: Path, overlap_steps: str
) -> None:
    async with run_group(tmp_path, overlap_steps) as group:
        running = asyncio.ensure_future(group.generate(0, "long", prompt_of(2, 30), 400))
        while not group.routers[0].deltas.get("long"):
            await asyncio.sleep(0.01)
        group.processes[1].kill()
        async with asyncio.timeout(60):
            deltas = await group.routers[0].end_of("long")
        running.cancel()
        assert deltas[-1].finish_reason == common_pb2.FINISH_REASON_ERROR
        # A router tries it elsewhere, if the client has no more than the first token.
        assert deltas[-1].error.code == common_pb2.ERROR_CODE_PEER_LOST
        message = deltas[-1].error.message
        assert message.startswith("decode-0 rank 0 of 2 cannot go on: another rank was lost")
        assert "decode-0 ends with all its ranks" in message
        status = await asyncio.to_thread(group.processes[0].wait, 10)
        assert status == 1, group.logs[0].read_text()
