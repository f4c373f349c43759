"""Short steps through static inputs are the same steps: same logits, same KV, nobody else's block.

On a CPU what would be captured is called. A step whose size is a bucket, and one of whose contexts
is as long as any may be, runs the very same numbers, so that every bit has to agree.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import ForwardBatch, build_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.execution import Execution
from engine.graphs.chunk_graphs import ChunkGraphs, capture_chunks, chunk_sizes, why_no_chunks
from engine.kernels.portable import portable_kernels
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.graphs.chunks import NUM_RANKS, run_rank, run_step, suffix_graphs
from tests.engine.parallel.counting_dispatcher import CountingDispatcher, local_dispatcher
from tests.engine.parallel.thread_ranks import run_ranks
from tests.engine.tiny import write_checkpoint

BLOCK_SIZE, MAX_SEQS, MAX_MODEL_LEN = 4, 3, 96
BUCKETS = (8, 24)
WIDTH = MAX_MODEL_LEN // BLOCK_SIZE
NUM_BLOCKS = 1 + MAX_SEQS * WIDTH


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def build(checkpoint: Path, *, has_pages: bool, **more: Any) -> DeepseekV3ForCausalLM:
    """Return a model that always attends in the absorbed form."""
    kernels = portable_kernels(has_paged_attention=has_pages)
    model = build_model(checkpoint, kernels=kernels, **more)
    assert isinstance(model, DeepseekV3ForCausalLM)
    model.attention.rule = replace(model.attention.rule, absorbed_cost=0.0)
    return model


@pytest.fixture(scope="module", params=[True, False], ids=["pages", "groups"])
def model(request: pytest.FixtureRequest, checkpoint: Path) -> DeepseekV3ForCausalLM:
    return build(checkpoint, has_pages=request.param)


@pytest.fixture(scope="module")
def paged(checkpoint: Path) -> DeepseekV3ForCausalLM:
    return build(checkpoint, has_pages=True)


def make_pool(model: DeepseekV3ForCausalLM) -> KVPool:
    """Return a pool of other sequences' numbers; block 0 holds NaN, as padding may leave it."""
    pool = build_kv_pool(model, NUM_BLOCKS, block_size=BLOCK_SIZE)
    generator = torch.Generator().manual_seed(1)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    pool.data[0] = float("nan")
    return pool


def make_graphs(model: DeepseekV3ForCausalLM, pool: KVPool) -> ChunkGraphs:
    graphs = suffix_graphs(
        model,
        pool,
        BUCKETS,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )
    graphs.capture()
    return graphs


def schedule(lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[ScheduledRequest]:
    """Return suffixes of (queries, positions), each in blocks of its own, in a random order."""
    draw = random.Random(seed)
    blocks = draw.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    scheduled = []
    for index, (queries, positions) in enumerate(lengths):
        request = Request(
            request_id=str(index),
            prompt_token_ids=[draw.randrange(128) for _ in range(positions)],
            sampling=SamplingParams(temperature=0.0),
            block_table=blocks[index * WIDTH : (index + 1) * WIDTH],
            num_computed_tokens=positions - queries,
        )
        scheduled.append(ScheduledRequest(request, queries))
    return scheduled


def run_plain(model: DeepseekV3ForCausalLM, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    pool = make_pool(model)
    with torch.inference_mode():
        hidden = model.forward(batch, pool)
    return hidden, pool.data[1:]


def run_short(model: DeepseekV3ForCausalLM, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    pool = make_pool(model)
    graphs = make_graphs(model, pool)
    # What another step has left in the buffers is nobody's.
    run_step(graphs, build_forward_batch(schedule([(1, 5), (9, 90), (14, 60)], 7), BLOCK_SIZE))
    pool.data.copy_(make_pool(model).data)
    return run_step(graphs, batch), pool.data[1:]


LONG = MAX_MODEL_LEN


@pytest.mark.parametrize(
    "lengths",
    [
        [(8, LONG)],
        [(24, LONG)],
        [(1, 17), (7, LONG)],
        [(3, 30), (20, LONG), (1, 64)],
        [(1, LONG), (6, 9), (1, 1)],
    ],
)
def test_a_step_as_large_as_a_bucket_is_the_same_bit_by_bit(
    paged: DeepseekV3ForCausalLM, lengths: list[tuple[int, int]]
) -> None:
    batch = build_forward_batch(schedule(lengths), BLOCK_SIZE)
    expected, expected_kv = run_plain(paged, batch)
    actual, kv = run_short(paged, batch)
    assert torch.equal(kv, expected_kv)
    assert torch.equal(actual, expected)


@st.composite
def short_steps(draw: st.DrawFn) -> list[tuple[int, int]]:
    lengths: list[tuple[int, int]] = []
    left = draw(st.integers(1, BUCKETS[-1]))
    while left and len(lengths) < MAX_SEQS:
        queries = draw(st.integers(1, left))
        lengths.append((queries, draw(st.integers(min(2 * queries, LONG), LONG))))
        left -= queries
    return lengths


@given(lengths=short_steps(), seed=st.integers(0, 99))
@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_mix_of_suffixes_gives_the_logits_and_the_kv_of_the_plain_step(
    model: DeepseekV3ForCausalLM, lengths: list[tuple[int, int]], seed: int
) -> None:
    batch = build_forward_batch(schedule(lengths, seed), BLOCK_SIZE)
    expected, expected_kv = run_plain(model, batch)
    actual, kv = run_short(model, batch)
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kv, expected_kv, rtol=1e-4, atol=1e-5)
    is_written = (kv != make_pool(model).data[1:]).flatten(1).any(1)
    owned = {
        block - 1
        for item in schedule(lengths, seed)
        for block in item.request.block_table[item.start // BLOCK_SIZE : -(-item.end // BLOCK_SIZE)]
    }
    assert set(is_written.nonzero().flatten().tolist()) <= owned


def test_padding_goes_to_no_expert(checkpoint: Path) -> None:
    counting = CountingDispatcher(local_dispatcher(8))
    model = build(checkpoint, has_pages=True, execution=Execution(dispatcher=counting))
    graphs = make_graphs(model, make_pool(model))
    counting.num_rows = 0
    run_step(graphs, build_forward_batch(schedule([(5, 40)]), BLOCK_SIZE))
    num_moe_layers, top_k = 2, 2
    assert counting.num_rows == 5 * top_k * num_moe_layers


def test_what_is_not_short_runs_as_before(paged: DeepseekV3ForCausalLM) -> None:
    graphs = make_graphs(paged, make_pool(paged))

    def takes(lengths: list[tuple[int, int]]) -> bool:
        return graphs.kind_of(build_forward_batch(schedule(lengths), BLOCK_SIZE)) is not None

    assert takes([(24, LONG)])
    assert not takes([(25, LONG)])
    assert takes([(1, 9), (1, 9), (1, 9)])
    few = suffix_graphs(
        paged,
        make_pool(paged),
        BUCKETS,
        max_num_seqs=1,
        max_model_len=50,
    )
    assert not few.kind_of(build_forward_batch(schedule([(1, 9), (1, 9)]), BLOCK_SIZE))
    assert not few.kind_of(build_forward_batch(schedule([(1, 51)]), BLOCK_SIZE))
    assert not graphs.kind_of(ForwardBatch.dummy())


def test_a_step_that_attends_in_the_other_form_runs_as_before(checkpoint: Path) -> None:
    model = build_model(checkpoint, kernels=portable_kernels(has_paged_attention=True))
    assert isinstance(model, DeepseekV3ForCausalLM)
    graphs, rule = make_graphs(model, make_pool(model)), model.attention_rule
    most = rule.most_absorbed(LONG)
    assert 1 < most < BUCKETS[-1]
    for count, is_short in ((most, True), (most + 1, False)):
        batch = build_forward_batch(schedule([(1, 9), (count, LONG)]), BLOCK_SIZE)
        assert (graphs.kind_of(batch) is not None) is is_short


def test_a_runner_samples_the_same_and_hears_of_every_layer(paged: DeepseekV3ForCausalLM) -> None:
    tokens, layers = [], []
    for is_short in (False, True):
        runner = ModelRunner(paged, make_pool(paged), Sampler(128))
        if is_short:
            runner, close = capture_chunks(
                runner,
                paged,
                sizes=BUCKETS,
                max_num_seqs=MAX_SEQS,
                max_model_len=MAX_MODEL_LEN,
            )
        done: list[int] = []
        results = runner.execute(schedule([(5, 41), (2, 80)]), on_layer_done=done.append)
        long = runner.execute(schedule([(60, 60)]))
        tokens.append([item.sampled.token_id for item in (*results, *long) if item.sampled])
        layers.append(done)
    close()
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 3
    assert layers[0] == layers[1] == [0, 1, 2]


def test_captured_sizes_end_with_the_largest_step() -> None:
    assert chunk_sizes(256) == (16, 32, 64, 128, 256)
    assert chunk_sizes(100) == (16, 32, 64, 100)
    assert chunk_sizes(16) == (16,)


def test_a_model_that_reads_counts_says_so(paged: DeepseekV3ForCausalLM) -> None:
    assert why_no_chunks(paged) == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(paged), "waits_for_counts", property(lambda self: True))
        assert "counts on the host" in why_no_chunks(paged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(paged), "attention_rule", property(lambda self: None))
        assert "lengths" in why_no_chunks(paged)


def capture(model: DeepseekV3ForCausalLM) -> tuple[ChunkGraphs, KVPool]:
    pool = make_pool(model)
    return make_graphs(model, pool), pool


def test_ranks_that_share_heads_agree_and_send_no_padding(
    checkpoint: Path, paged: DeepseekV3ForCausalLM
) -> None:
    """Of 24 rows, 12 a rank, the last of the second rank are padding."""
    batch = build_forward_batch(schedule([(5, 41), (6, 80)]), BLOCK_SIZE)
    run = partial(
        run_rank, build=partial(build, checkpoint, has_pages=True), capture=capture, batch=batch
    )
    ranks = run_ranks(NUM_RANKS, run)
    expected, expected_kv = run_plain(paged, batch)
    for hidden, kv, _ in ranks:
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kv, expected_kv, rtol=1e-4, atol=1e-5)
    num_moe_layers, top_k = 2, 2
    assert sum(count for _, _, count in ranks) == 11 * top_k * num_moe_layers
