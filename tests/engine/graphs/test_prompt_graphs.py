"""Captured steps of prompts are the same steps: same logits, same KV, nobody else's block.

On a CPU what would be captured is called. A prompt as long as a captured size runs the very same
numbers, so that every bit has to agree.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import ForwardBatch, build_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.execution import Execution
from engine.graphs import chunk_graphs
from engine.graphs.chunk_graphs import ChunkGraphs, capture_chunks, chunk_sizes
from engine.graphs.prompt_inputs import PromptShape, place_prompts
from engine.kernels.portable import portable_kernels
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.graphs.chunks import NUM_RANKS, prompt_graphs, run_rank, run_step
from tests.engine.parallel.counting_dispatcher import CountingDispatcher, local_dispatcher
from tests.engine.parallel.thread_ranks import run_ranks
from tests.engine.tiny import write_checkpoint

BLOCK_SIZE, MAX_SEQS, MAX_MODEL_LEN = 4, 3, 96
SIZES = (8, 24, 48)
WIDTH = MAX_MODEL_LEN // BLOCK_SIZE
NUM_BLOCKS = 1 + MAX_SEQS * WIDTH


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def build(checkpoint: Path, **more: Any) -> DeepseekV3ForCausalLM:
    kernels = portable_kernels(has_paged_attention=True)
    model = build_model(checkpoint, kernels=kernels, **more)
    assert isinstance(model, DeepseekV3ForCausalLM)
    # With heads as small as these nearly everything behind a cached token would be absorbed.
    model.attention.rule = replace(model.attention.rule, absorbed_cost=1e9)
    return model


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> DeepseekV3ForCausalLM:
    return build(checkpoint)


def make_pool(model: DeepseekV3ForCausalLM) -> KVPool:
    """Return a pool of other sequences' numbers; block 0 holds NaN, as padding may leave it."""
    pool = build_kv_pool(model, NUM_BLOCKS, block_size=BLOCK_SIZE)
    generator = torch.Generator().manual_seed(1)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    pool.data[0] = float("nan")
    return pool


def make_graphs(model: DeepseekV3ForCausalLM, pool: KVPool, max_num_cached: int = 0) -> ChunkGraphs:
    graphs = prompt_graphs(model, pool, SIZES, max_num_seqs=MAX_SEQS, max_num_cached=max_num_cached)
    graphs.capture()
    return graphs


def schedule(
    lengths: Sequence[int], seed: int = 0, *, cached: Sequence[int] = ()
) -> list[ScheduledRequest]:
    """Return so many tokens of each prompt, in blocks of its own in a random order."""
    draw = random.Random(seed)
    blocks = draw.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    scheduled = []
    for index, count in enumerate(lengths):
        start = cached[index] if cached else 0
        request = Request(
            request_id=str(index),
            prompt_token_ids=[draw.randrange(128) for _ in range(start + count)],
            sampling=SamplingParams(temperature=0.0),
            block_table=blocks[index * WIDTH : (index + 1) * WIDTH],
            num_computed_tokens=start,
        )
        scheduled.append(ScheduledRequest(request, count))
    return scheduled


def run_plain(model: DeepseekV3ForCausalLM, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    pool = make_pool(model)
    with torch.inference_mode():
        hidden = model.forward(batch, pool)
    return hidden, pool.data[1:]


def run_captured(
    model: DeepseekV3ForCausalLM, batch: ForwardBatch, max_num_cached: int = 0
) -> tuple[Tensor, Tensor]:
    pool = make_pool(model)
    graphs = make_graphs(model, pool, max_num_cached)
    # What another step has left in the buffers is nobody's.
    cached = [min(max_num_cached, 50), 0, 0]
    run_step(graphs, build_forward_batch(schedule([9, 21, 5], 7, cached=cached), BLOCK_SIZE))
    pool.data.copy_(make_pool(model).data)
    return run_step(graphs, batch), pool.data[1:]


@pytest.mark.parametrize("count", SIZES)
def test_a_prompt_as_long_as_a_size_is_the_same_bit_by_bit(
    model: DeepseekV3ForCausalLM, count: int
) -> None:
    batch = build_forward_batch(schedule([count]), BLOCK_SIZE)
    expected, expected_kv = run_plain(model, batch)
    actual, kv = run_captured(model, batch)
    assert torch.equal(kv, expected_kv)
    assert torch.equal(actual, expected)


MAX_CACHED = 30


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Return new and cached tokens of each prompt."""
    lengths: list[int] = []
    cached: list[int] = []
    left = draw(st.integers(2, SIZES[-1]))
    room = draw(st.sampled_from([0, MAX_CACHED]))
    while left > 1 and len(lengths) < MAX_SEQS:
        lengths.append(draw(st.integers(2, left)))
        left -= lengths[-1]
        cached.append(draw(st.integers(0, min(room, lengths[-1]))))
        room -= cached[-1]
    return lengths, cached


@given(drawn=prompts(), seed=st.integers(0, 99))
@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_prompts_give_the_hidden_states_and_the_kv_of_the_plain_step(
    model: DeepseekV3ForCausalLM, drawn: tuple[list[int], list[int]], seed: int
) -> None:
    lengths, cached = drawn
    scheduled = schedule(lengths, seed, cached=cached)
    batch = build_forward_batch(scheduled, BLOCK_SIZE)
    expected, expected_kv = run_plain(model, batch)
    actual, kv = run_captured(model, batch, MAX_CACHED if any(cached) else 0)
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kv, expected_kv, rtol=1e-4, atol=1e-5)
    is_written = (kv != make_pool(model).data[1:]).flatten(1).any(1)
    owned = {
        block - 1
        for item in scheduled
        for block in item.request.block_table[item.start // BLOCK_SIZE : -(-item.end // BLOCK_SIZE)]
    }
    assert set(is_written.nonzero().flatten().tolist()) <= owned


@given(
    counts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=6),
    padding=st.integers(0, 50),
    room=st.integers(0, 50),
    spare=st.integers(0, 3),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_places_find_every_position_in_its_own_block(
    counts: list[tuple[int, int]], padding: int, room: int, spare: int, block_size: int
) -> None:
    lengths = [(queries, queries + cached) for queries, cached in counts]
    num_tokens, num_cached = (sum(column) for column in zip((0, 0), *counts, strict=True))
    total = num_tokens + num_cached
    shape = PromptShape(
        num_tokens=max(num_tokens + padding, 1),
        num_cached=num_cached + room,
        num_seqs=len(counts) + spare,
        block_size=block_size,
    )
    places = place_prompts(shape, lengths)
    assert len(places.owners) == len(places.columns) < shape.num_blocks
    assert len(places.kept) == shape.num_positions
    blocks, offsets = np.divmod(places.kept, block_size)
    expected = [
        (seq, *divmod(at, block_size))
        for seq, (_, positions) in enumerate(lengths)
        for at in range(positions)
    ]
    found = [
        (int(places.owners[block]), int(places.columns[block]), int(offset))
        for block, offset in zip(blocks[:total], offsets[:total], strict=True)
    ]
    assert found == expected
    # What is left is in the last block, which is no prompt's.
    assert (blocks[total:] == shape.num_blocks - 1).all()
    found_lengths = np.diff(places.cu_seqlens).T.tolist()
    num_padding = shape.num_tokens - num_tokens
    assert found_lengths[: len(counts)] == [list(pair) for pair in lengths]
    assert found_lengths[len(counts)] == [num_padding, num_padding]
    assert found_lengths[len(counts) + 1 :] == [[0, 0]] * spare


def test_padding_goes_to_no_expert(checkpoint: Path) -> None:
    counting = CountingDispatcher(local_dispatcher(8))
    model = build(checkpoint, execution=Execution(dispatcher=counting))
    graphs = make_graphs(model, make_pool(model))
    counting.num_rows = 0
    run_step(graphs, build_forward_batch(schedule([5, 12]), BLOCK_SIZE))
    num_moe_layers, top_k = 2, 2
    assert counting.num_rows == 17 * top_k * num_moe_layers


def test_prompts_are_taken_behind_few_cached_tokens(model: DeepseekV3ForCausalLM) -> None:
    graphs = make_graphs(model, make_pool(model))

    def takes(*lengths: int, cached: Sequence[int] = ()) -> bool:
        batch = build_forward_batch(schedule(lengths, cached=cached), BLOCK_SIZE)
        return graphs.kind_of(batch) is not None

    assert takes(SIZES[-1])
    assert takes(2, 2, SIZES[-1] - 4)
    assert not takes(SIZES[-1] + 1)
    assert not takes(9, 20, cached=(0, 4)), "attends to more than the step"
    behind = make_graphs(model, make_pool(model), 4)
    assert behind.kind_of(build_forward_batch(schedule([9, 20], cached=(0, 4)), BLOCK_SIZE))
    assert not behind.kind_of(build_forward_batch(schedule([9, 20], cached=(2, 3)), BLOCK_SIZE))
    assert not takes(1), "a single query is absorbed"
    assert not graphs.kind_of(ForwardBatch.dummy())
    few = prompt_graphs(model, make_pool(model), SIZES, max_num_seqs=1)
    assert not few.kind_of(build_forward_batch(schedule([2, 2]), BLOCK_SIZE))


def test_a_runner_samples_the_same_and_hears_of_layers_in_pieces(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_graphs, "LAYERS_OF_A_PIECE", 2)
    tokens, told = [], []
    done: list[int] = []
    last = model.model.layers[2]
    monkeypatch.setattr(last, "forward", _noting(last.forward, lambda: done.append(-1)))
    plain = ModelRunner(model, make_pool(model), Sampler(128))
    captured, close = capture_chunks(
        plain, model, sizes=SIZES, max_num_seqs=MAX_SEQS, max_model_len=MAX_MODEL_LEN
    )
    for runner in (plain, captured):
        done.clear()
        results = runner.execute(schedule([5, 12]), on_layer_done=done.append)
        tokens.append([item.sampled.token_id for item in results if item.sampled])
        told.append(list(done))
    close()
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 2
    assert told[0] == told[1] == [0, 1, -1, 2], "before the last of three layers runs"


def _noting(forward: Any, note: Any) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return forward(*args, **kwargs)

    return noted


def test_captured_sizes_end_with_the_largest_step() -> None:
    assert chunk_sizes(16384)[-1] == 4096
    assert chunk_sizes(1100) == (16, 32, 64, 128, 256, 512, 1024, 1100)


def capture(model: DeepseekV3ForCausalLM) -> tuple[ChunkGraphs, KVPool]:
    pool = make_pool(model)
    return make_graphs(model, pool), pool


def test_ranks_that_share_heads_agree_and_send_no_padding(
    checkpoint: Path, model: DeepseekV3ForCausalLM
) -> None:
    """Of 24 rows, 12 a rank, the last of the first rank and all of the second's are padding."""
    batch = build_forward_batch(schedule([5, 6]), BLOCK_SIZE)
    run = partial(run_rank, build=partial(build, checkpoint), capture=capture, batch=batch)
    ranks = run_ranks(NUM_RANKS, run)
    expected, expected_kv = run_plain(model, batch)
    for hidden, kv, _ in ranks:
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kv, expected_kv, rtol=1e-4, atol=1e-5)
    num_moe_layers, top_k = 2, 2
    assert sum(count for _, _, count in ranks) == 11 * top_k * num_moe_layers
