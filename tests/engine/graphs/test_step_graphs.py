"""Fixed-shape steps give the tokens of the runner, whoever comes and goes, read late or at once."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.boot.build import build_model
from engine.execution import Execution
from engine.graphs.buckets import batch_buckets, bucket_for
from engine.graphs.graph_budget import extrapolate
from engine.graphs.graph_runner import GraphRunner, capture_steps
from engine.graphs.step_graphs import StepGraphs
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.pending_step import PendingStep, StepResult
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.graph_sampler import MAX_EDITS
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.parallel.counting_dispatcher import CountingDispatcher, local_dispatcher
from tests.engine.tiny import TINY, write_checkpoint

BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN, NUM_BLOCKS = 4, 10, 48, 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV3ForCausalLM:
    return build_model(write_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def make_pool(model: DeepseekV3ForCausalLM) -> KVPool:
    config = model.config
    return KVPool(NUM_BLOCKS, config.num_hidden_layers, BLOCK_SIZE, config.kv_spec)


def make_runner(model: DeepseekV3ForCausalLM) -> ModelRunner:
    return ModelRunner(model, make_pool(model), Sampler(model.config.vocab_size))


def make_graphs(model: DeepseekV3ForCausalLM, pool: KVPool) -> StepGraphs:
    graphs = StepGraphs(
        model,
        pool,
        vocab_size=model.config.vocab_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )
    graphs.capture()
    return graphs


def draw_requests(seed: int, count: int) -> list[Request]:
    draw = random.Random(seed)
    requests = []
    for index in range(count):
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.6, 1.0]),
            top_p=draw.choice([1.0, 0.8]),
            top_k=draw.choice([0, 5]),
            repetition_penalty=draw.choice([1.0, 1.3]),
            presence_penalty=draw.choice([0.0, 0.7]),
            logit_bias=draw.choice([{}, {3: 4.0, 77: -5.0}]),
            num_logprobs=draw.choice([-1, -1, 0, 2]),
            seed=draw.getrandbits(64),
        )
        prompt = [draw.randrange(128) for _ in range(draw.randint(1, 14))]
        requests.append(Request(request_id=str(index), prompt_token_ids=prompt, sampling=params))
    return requests


class Worker:
    """A scheduler of a few lines: every request has its blocks from the start."""

    def __init__(self, runner: ModelRunner, graphs: StepGraphs | None) -> None:
        self.runner, self.graphs = runner, graphs
        self._next_block = 1

    def start(self, requests: Sequence[Request]) -> None:
        """Run the prompts in the runner, one step for all."""
        count = MAX_MODEL_LEN // BLOCK_SIZE
        for request in requests:
            request.block_table = list(range(self._next_block, self._next_block + 1))
            request.block_table += range(self._next_block + 1, self._next_block + count)
            self._next_block += count
        scheduled = [ScheduledRequest(item, item.num_prompt_tokens) for item in requests]
        self.book(self.runner.execute(scheduled))

    def book(self, results: Sequence[StepResult]) -> None:
        for result in results:
            request = result.request
            assert result.sampled is not None
            request.num_computed_tokens = request.num_tokens
            request.output_token_ids.append(result.sampled.token_id)

    def launch(self, requests: Sequence[Request], after: PendingStep | None = None) -> PendingStep:
        scheduled = [ScheduledRequest(request, 1) for request in requests]
        for request in requests:
            request.num_launched_tokens += 1
        if self.graphs is None:
            return self.runner.launch(scheduled, after=after)
        assert self.graphs.takes(scheduled)
        return self.graphs.launch_step(scheduled, after=after)

    def collect(self, pending: PendingStep) -> list[StepResult]:
        results = pending.collect()
        for item in pending.scheduled:
            item.request.num_launched_tokens -= 1
        self.book(results)
        return results


def schedules(seed: int, num_steps: int, count: int) -> list[list[int]]:
    """Draw who runs in each step: requests rest, come back, and change places."""
    draw = random.Random(seed)
    return [draw.sample(range(count), draw.randint(1, count)) for _ in range(num_steps)]


def outcome(
    model: DeepseekV3ForCausalLM, seed: int, *, with_graphs: bool, ahead: bool
) -> tuple[list[list[int]], list[list[StepResult]]]:
    """Run drawn requests through drawn steps; their tokens, and all results."""
    requests = draw_requests(seed, MAX_NUM_SEQS)
    runner = make_runner(model)
    worker = Worker(runner, make_graphs(model, runner.kv_pool) if with_graphs else None)
    worker.start(requests)
    results: list[list[StepResult]] = []
    before: PendingStep | None = None
    for rows in schedules(seed, 12, len(requests)):
        pending = worker.launch([requests[row] for row in rows], before if ahead else None)
        if ahead:
            if before is not None:
                results.append(worker.collect(before))
            before = pending
        else:
            results.append(worker.collect(pending))
    if before is not None:
        results.append(worker.collect(before))
    return [request.output_token_ids for request in requests], results


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_and_logprobs_are_those_of_the_runner(
    model: DeepseekV3ForCausalLM, seed: int, ahead: bool
) -> None:
    expected, expected_results = outcome(model, seed, with_graphs=False, ahead=False)
    actual, actual_results = outcome(model, seed, with_graphs=True, ahead=ahead)
    assert actual == expected
    for step, expected_step in zip(actual_results, expected_results, strict=True):
        for result, wanted in zip(step, expected_step, strict=True):
            assert result.sampled is not None
            assert wanted.sampled is not None
            ours, theirs = result.sampled.logprobs, wanted.sampled.logprobs
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.top_ids == theirs.top_ids
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_request_may_return_with_other_blocks(model: DeepseekV3ForCausalLM) -> None:
    tokens = []
    for moves in (False, True):
        runner = make_runner(model)
        worker = Worker(runner, make_graphs(model, runner.kv_pool))
        requests = draw_requests(3, 2)
        worker.start(requests)
        worker.collect(worker.launch(requests))
        if moves:
            moved = list(range(300, 300 + len(requests[0].block_table)))
            runner.kv_pool.copy_in(moved, runner.kv_pool.copy_out(requests[0].block_table))
            runner.kv_pool.data[requests[0].block_table] = float("nan")
            requests[0].block_table = moved
        worker.collect(worker.launch(requests))
        tokens.append([request.output_token_ids for request in requests])
    assert tokens[0] == tokens[1]


def test_an_unusable_row_is_reported_and_spoils_nothing(model: DeepseekV3ForCausalLM) -> None:
    runner = make_runner(model)
    worker = Worker(runner, make_graphs(model, runner.kv_pool))
    requests = draw_requests(0, 3)
    worker.start(requests)
    runner.kv_pool.data[requests[1].block_table[0]] = float("nan")
    results = worker.launch(requests).collect()
    assert [result.is_failed for result in results] == [False, True, False]
    assert results[1].sampled is None


def test_a_rank_without_requests_joins_with_the_group_s_mean(model: DeepseekV3ForCausalLM) -> None:
    pool = make_pool(model)
    graphs = make_graphs(model, pool)
    before = pool.data[1:].clone()
    assert graphs.launch_step([], group_mean=7).collect() == []
    assert torch.equal(pool.data[1:], before)


def test_no_row_of_padding_comes_to_an_expert(tmp_path: Path) -> None:
    """Whatever the batch is padded to."""
    counted = CountingDispatcher(local_dispatcher(TINY["n_routed_experts"]))
    model = build_model(write_checkpoint(tmp_path), execution=Execution(dispatcher=counted))
    runner = make_runner(model)
    worker = Worker(runner, make_graphs(model, runner.kv_pool))
    requests = draw_requests(5, MAX_NUM_SEQS)
    worker.start(requests)
    num_moe_layers = TINY["num_hidden_layers"] - TINY["first_k_dense_replace"]
    for count in (0, 1, 2, 3, 9, 10):
        counted.num_rows = 0
        scheduled = [ScheduledRequest(request, 1) for request in requests[:count]]
        assert worker.graphs is not None
        worker.graphs.launch_step(scheduled, group_mean=6).collect()
        assert counted.num_rows == count * TINY["num_experts_per_tok"] * num_moe_layers, count


def test_a_dummy_of_the_plain_runner_comes_to_no_expert_either(tmp_path: Path) -> None:
    counted = CountingDispatcher(local_dispatcher(TINY["n_routed_experts"]))
    model = build_model(write_checkpoint(tmp_path), execution=Execution(dispatcher=counted))
    GraphRunner(make_runner(model), None).run_dummy(group_mean=3)
    assert counted.num_rows == 0


def test_steps_of_another_kind_are_refused(model: DeepseekV3ForCausalLM) -> None:
    graphs = make_graphs(model, make_pool(model))
    request = Request(request_id="", prompt_token_ids=[1, 2, 3], sampling=SamplingParams())
    assert not graphs.takes([ScheduledRequest(request, 2)])
    request.num_computed_tokens = 2
    assert graphs.takes([ScheduledRequest(request, 1)])
    assert not graphs.takes([ScheduledRequest(request, 1)] * (MAX_NUM_SEQS + 1))


@pytest.mark.parametrize("penalty", [{"presence_penalty": 90.0}, {"frequency_penalty": 0.3}])
def test_a_step_that_graphs_cannot_take_goes_to_the_runner(
    model: DeepseekV3ForCausalLM, penalty: dict[str, Any]
) -> None:
    """What it sampled counts for the penalties of the steps after it, and counts once."""
    tokens = []
    for with_graphs in (False, True):
        runner = make_runner(model)
        worker = Worker(runner, None)
        requests = draw_requests(0, 2)
        penalised = SamplingParams(temperature=0.0, **penalty)
        requests[0].sampling = penalised
        worker.start(requests)
        steps = GraphRunner(runner, make_graphs(model, runner.kv_pool)) if with_graphs else runner
        before: PendingStep | None = None
        for step in range(24):
            num_stops = MAX_EDITS + 1 if step % 3 == 1 else 0
            stops = tuple(range(128, 128 + num_stops))
            requests[1].sampling = SamplingParams(
                temperature=0.0, min_tokens=9, stop_token_ids=stops
            )
            scheduled = [ScheduledRequest(request, 1) for request in requests]
            pending = steps.launch(scheduled, after=before)
            for request in requests:
                request.num_launched_tokens += 1
            if before is not None:
                worker.collect(before)
            before = pending
        assert before is not None
        worker.collect(before)
        tokens.append([request.output_token_ids for request in requests])
    assert tokens[0] == tokens[1]


def test_progress_counts_all_graphs(model: DeepseekV3ForCausalLM) -> None:
    graphs = StepGraphs(
        model, make_pool(model), vocab_size=128, max_num_seqs=9, max_model_len=MAX_MODEL_LEN
    )
    seen: list[tuple[int, int]] = []
    graphs.capture(lambda done, total: seen.append((done, total)))
    assert graphs.buckets == (1, 2, 4, 8, 9)
    assert seen == [(3 * (i + 1), 15) for i in range(5)]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (30, (1, 2, 4, 8, 16, 24, 30))],
)
def test_buckets(most: int, sizes: tuple[int, ...]) -> None:
    assert batch_buckets(most) == sizes
    for count in range(most + 1):
        bucket = bucket_for(count, sizes)
        assert bucket >= count
        assert not [size for size in sizes if count <= size < bucket]


def test_steps_of_a_runner_are_captured(model: DeepseekV3ForCausalLM) -> None:
    runner = make_runner(model)
    seen: list[int] = []
    steps = capture_steps(
        runner,
        max_num_seqs=3,
        max_model_len=MAX_MODEL_LEN,
        progress=lambda done, _: seen.append(done),
    )
    assert seen == [3, 6, 9]
    steps.run_dummy(group_mean=2)


def test_what_further_sizes_add_is_extrapolated() -> None:
    assert extrapolate(100, 110, 5) == 140
    assert extrapolate(100, 95, 5) == 100
