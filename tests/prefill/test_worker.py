"""Prefill workers as real processes: one rank and two, writing into a real transport's memory."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.boot.build import build_kv_pool, build_model
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import NO_DRAFT
from kv_transfer.transport import peer_name
from prefill.__main__ import main
from prefill.assembly import layout_of
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
)
from runtime.pb import common_pb2, decode_pb2, prefill_pb2, prefill_pb2_grpc, registry_pb2
from runtime.rpc.grpc_calls import open_channel
from runtime.sampling import SamplingParams
from tests.engine.model.test_mtp import draft
from tests.prefill.fake_decode import CREDENTIALS
from tests.prefill.real_decode import (
    NUM_BLOCKS,
    FakeRegistry,
    RealDecode,
    greedy,
    logs_on_failure,
    prefill_processes,
    serve,
)
from tests.processes.forked import Process

MODEL = Path(__file__).parents[2] / "deploy" / "models" / "tandem-python"
PROMPT = [3 + (17 * index) % 4000 for index in range(200)]
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Oracle:
    """What one process computes from the whole prompt at once."""

    first_token: int
    kv: torch.Tensor  # [blocks of the prompt, layers, block_size, latent]
    layout: KVLayout
    first_draft: int = NO_DRAFT


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    model = build_model(MODEL)
    pool = build_kv_pool(model, NUM_BLOCKS)
    runner = ModelRunner(model, pool, Sampler(model.config.vocab_size))
    request = Request(
        request_id="oracle",
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(temperature=0.0),
        block_table=[1, 2, 3, 4],
    )
    (result,) = runner.execute([ScheduledRequest(request, len(PROMPT))])
    assert result.sampled is not None
    return Oracle(result.sampled.token_id, pool.data[1:5].clone(), layout_of(pool, 1))


@pytest.fixture(scope="module")
def drafting_oracle(oracle: Oracle) -> Oracle:
    """The same with the KV of the layer for multi-token prediction, and its draft."""
    model = build_model(MODEL, with_mtp=True)
    pool = build_kv_pool(model, NUM_BLOCKS)
    _, drafted = draft(model, [*PROMPT, oracle.first_token], pool)
    first_draft = int(model.compute_logits(drafted[-1:]).argmax())
    return Oracle(oracle.first_token, pool.data[1:5].clone(), layout_of(pool, 1), first_draft)


@dataclass
class Bench:
    """A running worker and what it talks to."""

    decode: RealDecode
    registry: FakeRegistry
    record: registry_pb2.WorkerRecord
    processes: list[Process]
    stub: prefill_pb2_grpc.PrefillStub

    async def run(
        self,
        nonce: int,
        block_ids: list[int],
        *,
        num_tokens: int = 8,
        num_cached_tokens: int = 0,
        prompt: Sequence[int] = PROMPT,
    ) -> prefill_pb2.RunResponse:
        request = prefill_pb2.RunRequest(
            request_id=f"request-{nonce}",
            expected=self.record.identity,
            context_token_ids=prompt,
            sampling=greedy(num_tokens),
            reservation=self.decode.reserve_blocks(
                nonce, block_ids, num_cached_tokens=num_cached_tokens
            ),
            timeout_s=60.0,
        )
        response: prefill_pb2.RunResponse = await self.stub.Run(request, timeout=60)
        return response

    async def parts_of(self, nonce: int) -> list[decode_pb2.PartClosure]:
        """Every rank's part of a closed ticket."""
        async with asyncio.timeout(60):
            while True:
                found = self.decode.parts_of(nonce)
                if len(found) == self.record.num_parts:
                    return found
                await asyncio.sleep(0.01)

    async def until_idle(self) -> None:
        """Wait until the worker reports that every block is free."""
        async with asyncio.timeout(60):
            while True:
                load = self.registry.loads[-1] if self.registry.loads else None
                if load and 0 < load.num_total_blocks == load.num_free_blocks:
                    return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def worker(
    oracle: Oracle,
    folder: Path,
    *,
    tp: int = 1,
    dp: int = 1,
    layers_per_group: int = 0,
    step_timeout_s: float = 30.0,
) -> AsyncIterator[Bench]:
    """A running instance, addressed at its last endpoint."""
    prefill = PrefillSection(
        tp=tp,
        dp=dp,
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=96,
        step_timeout_s=step_timeout_s,
    )
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL)),
        prefill=prefill,
        decode=DecodeSection(num_speculative_tokens=oracle.layout.num_mtp_layers),
        kv_transfer=KVTransferSection(transport="loopback", layers_per_group=layers_per_group),
    )
    registry = FakeRegistry()
    decode = RealDecode(oracle.layout)
    with logs_on_failure(folder):
        async with (
            serve(decode, registry) as address,
            prefill_processes(config, address, folder) as processes,
        ):
            async with asyncio.timeout(300):
                records = [await registry.workers.get() for _ in range(dp)]
            record = max(records, key=lambda item: item.identity.rank)
            channel = open_channel(record.address, CREDENTIALS)
            stub = prefill_pb2_grpc.PrefillStub(channel)
            yield Bench(decode, registry, record, processes, stub)
            await channel.close(None)


async def check_transfer(bench: Bench, oracle: Oracle) -> None:
    """Send the prompt twice: whole, and the part that decode lacks."""
    response = await bench.run(1, [9, 4, 5, 20])
    assert response.WhichOneof("result") == "first_token", response
    assert response.first_token.token_id == oracle.first_token
    assert len(response.first_token.logprobs.top_ids) == 2
    async with asyncio.timeout(60):
        arrival = await bench.decode.arrivals.get()
    assert arrival.record is not None
    assert arrival.record.first_token == oracle.first_token
    assert arrival.record.logprobs is not None
    assert arrival.record.first_draft == oracle.first_draft
    kv = bench.decode.kv
    num_last = len(PROMPT) % 64
    torch.testing.assert_close(kv[[9, 4, 5]], oracle.kv[:3], rtol=1e-3, atol=1e-3)
    last, expected = kv[20, :, :num_last], oracle.kv[3, :, :num_last]
    torch.testing.assert_close(last, expected, rtol=1e-3, atol=1e-3)
    assert {item.outcome for item in await bench.parts_of(1)} == {decode_pb2.TICKET_OUTCOME_SENT}

    # The second time both sides have the prefix: nothing but the rest is computed and sent.
    response = await bench.run(2, [11, 12], num_cached_tokens=128)
    assert response.first_token.token_id == oracle.first_token
    assert response.first_token.num_cached_tokens == 192
    closures = await bench.parts_of(2)
    torch.testing.assert_close(kv[11], oracle.kv[2], rtol=1e-3, atol=1e-3)
    sent_bytes = sum(item.num_bytes for item in closures)
    block_bytes = bench.decode.layout.block_bytes
    assert 2 * block_bytes < sent_bytes < 2.1 * block_bytes  # and the metadata
    untouched = [index for index in range(NUM_BLOCKS) if index not in (4, 5, 9, 11, 12, 20)]
    assert not kv[untouched].any()


async def check_drain(bench: Bench) -> None:
    """SIGTERM to every rank: all end by themselves, in order."""
    for process in bench.processes:
        process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        statuses = [await asyncio.to_thread(process.wait) for process in bench.processes]
    assert statuses == [0] * len(statuses)
    # An idle worker may be out of the pool before there was time to say that it drains.
    assert bench.registry.left.is_set()


async def test_one_rank_sends_what_one_process_computes(oracle: Oracle, tmp_path: Path) -> None:
    async with worker(oracle, tmp_path) as bench:
        assert bench.record.role == common_pb2.ROLE_PREFILL
        assert (bench.record.model, bench.record.block_size) == ("tandem-python", 64)
        await check_transfer(bench, oracle)
        response = await bench.run(3, [1, 2, 3, 6], num_tokens=1)
        assert response.first_token.finish_reason == common_pb2.FINISH_REASON_LENGTH
        (closing,) = await bench.parts_of(3)
        assert closing.outcome == decode_pb2.TICKET_OUTCOME_NOT_NEEDED
        await bench.until_idle()
        await check_drain(bench)


async def test_two_ranks_send_half_each_group_by_group(oracle: Oracle, tmp_path: Path) -> None:
    async with worker(oracle, tmp_path, tp=2, layers_per_group=2) as bench:
        assert bench.record.num_ranks == 2
        await check_transfer(bench, oracle)
        by_rank = {item.rank: item.num_bytes for item in await bench.parts_of(1)}
        assert by_rank.keys() == {0, 1}
        assert max(by_rank.values()) < 1.1 * min(by_rank.values())
        claims = [(claim.num_prefill_ranks, claim.has_endpoint) for claim in bench.decode.claims]
        assert claims == [(2, False), (2, True)]
        assert [len(closing.closures) for closing in bench.decode.closings] == [1, 1]
        await bench.until_idle()
        await check_drain(bench)


async def test_a_data_parallel_rank_sends_all_of_its_kv(oracle: Oracle, tmp_path: Path) -> None:
    async with worker(oracle, tmp_path, dp=2, layers_per_group=2) as bench:
        assert (bench.record.num_ranks, bench.record.num_parts) == (2, 1)
        assert bench.record.identity.rank == 1
        await check_transfer(bench, oracle)
        (closing,) = await bench.parts_of(1)
        assert bench.decode.closings[0].prefill == bench.record.identity
        assert closing.rank == bench.record.identity.rank
        assert closing.num_bytes > 4 * bench.decode.layout.block_bytes * 0.75
        claim = bench.decode.claims[0]
        assert (claim.prefill, claim.num_prefill_ranks) == (bench.record.identity, 1)
        await bench.until_idle()
        await check_drain(bench)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
async def test_where_decode_drafts_its_layer_and_the_first_draft_come_with_the_prompt(
    drafting_oracle: Oracle, tmp_path: Path, tp: int, dp: int
) -> None:
    """In chunks of 96 tokens; the second prompt begins with a cached prefix."""
    async with worker(drafting_oracle, tmp_path, tp=tp, dp=dp, layers_per_group=2) as bench:
        await check_transfer(bench, drafting_oracle)
        async with asyncio.timeout(60):
            arrival = await bench.decode.arrivals.get()
        assert arrival.record is not None
        assert arrival.record.first_draft == drafting_oracle.first_draft
        await bench.until_idle()
        await check_drain(bench)


async def test_only_the_writing_rank_can_say_that_it_has_drained(
    oracle: Oracle, tmp_path: Path
) -> None:
    async with worker(oracle, tmp_path, dp=2) as bench:
        other = common_pb2.WorkerIdentity()
        other.CopyFrom(bench.record.identity)
        other.rank = 0
        answers = [
            await bench.stub.Revoke(
                prefill_pb2.RevokeRequest(nonce=5, prefill=prefill, remember_s=60.0), timeout=60
            )
            for prefill in (other, bench.record.identity)
        ]
        assert [answer.drained for answer in answers] == [False, True]
        response = await bench.run(5, [1, 2, 3, 4])
        assert response.error.code == common_pb2.ERROR_CODE_STALE_TICKET


@pytest.mark.parametrize("axis", ["tp", "dp"])
async def test_when_a_rank_dies_calls_are_answered_and_the_instance_ends(
    oracle: Oracle, tmp_path: Path, axis: str
) -> None:
    async with worker(oracle, tmp_path, **{axis: 2}) as bench:
        dead = 1 - bench.record.identity.rank
        call = asyncio.create_task(bench.run(1, [1, 2, 3, 4]))
        await asyncio.sleep(0)
        bench.processes[dead].kill()
        response = await call
        # The router may still have it served by another instance; so it may where the call comes
        # after the rank has heard of the death.
        elsewhere = (common_pb2.ERROR_CODE_PEER_LOST, common_pb2.ERROR_CODE_DRAINING)
        assert response.error.code in elsewhere
        assert response.error.request_id == "request-1"
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(bench.processes[1 - dead].wait) == 1


async def test_when_a_rank_hangs_calls_may_go_elsewhere_and_the_instance_ends(
    oracle: Oracle, tmp_path: Path
) -> None:
    async with worker(oracle, tmp_path, dp=2, step_timeout_s=5.0) as bench:
        hanging = bench.processes[1 - bench.record.identity.rank]
        hanging.send_signal(signal.SIGSTOP)
        response = await bench.run(1, [1, 2, 3, 4])
        assert response.error.code == common_pb2.ERROR_CODE_PEER_LOST
        assert response.error.message.startswith("prefill-0 rank 1 of 2 cannot go on: ")
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(bench.processes[1].wait) == 1
        # Decode is told the same where the rank had come to ask it.
        parts = bench.decode.parts_of(1)
        assert len(parts) == len(bench.decode.claims)
        assert {part.error.code for part in parts} <= {common_pb2.ERROR_CODE_PEER_LOST}


async def test_a_worker_that_was_shut_out_meets_decode_again(
    oracle: Oracle, tmp_path: Path
) -> None:
    async with worker(oracle, tmp_path) as bench:
        await bench.run(1, [1, 2, 3, 4])
        await bench.parts_of(1)
        bench.decode.answer_gate = gate = asyncio.Event()
        call = asyncio.create_task(bench.run(2, [5, 6, 7, 8]))
        async with asyncio.timeout(60):
            while len(bench.decode.claims) < 2:
                await asyncio.sleep(0.01)
        identity = bench.record.identity
        bench.decode.kv_transport.fence(peer_name(identity.instance, identity.epoch, 0))
        gate.set()  # the ticket of before the fence
        await call
        (closing,) = await bench.parts_of(2)
        assert closing.outcome == decode_pb2.TICKET_OUTCOME_FAILED
        assert not bench.decode.kv[[5, 6, 7, 8]].any()

        await bench.run(3, [9, 10, 11, 12])
        (closing,) = await bench.parts_of(3)
        assert closing.outcome == decode_pb2.TICKET_OUTCOME_SENT
        await bench.until_idle()


def test_the_wrong_rank_or_a_missing_rendezvous_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[prefill]\ntp = 2\n")
    common = ["--config", str(file), "--instance", "prefill-0", "--router", "127.0.0.1:1"]
    assert main([*common, "--rank", "2"]) == 2
    assert main(common) == 2
