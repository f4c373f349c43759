"""On a GPU, captured steps do what the same work does when it is called."""

import random
from contextlib import nullcontext

import pytest
import torch

from engine.boot.build import LoadFormat, build_kv_pool, build_model
from engine.execution import Execution
from engine.graphs.step_graphs import StepGraphs
from engine.kernels.create import KernelSet, create_kernels
from engine.kernels.launches import Launches, dependent_launches
from engine.layers.moe import MoE
from engine.layers.shared_expert import SharedSchedule
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.groups import RankGroup
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.pending_step import PendingStep
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.side_stream import SideStream
from engine.streams import Streams
from runtime.sampling import SamplingParams
from tests.engine.graphs.uneven_main import NARROW

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MAX_NUM_SEQS, MAX_MODEL_LEN, NUM_STEPS, BLOCK_SIZE = 20, 512, 24, 64


@pytest.fixture(scope="module", params=[None, KernelSet.TRITON], ids=["fastest", "triton"])
def model(request: pytest.FixtureRequest) -> DeepseekV3ForCausalLM:
    """With the kernels of the device, and with our own alone, paged attention too."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    kernels = create_kernels("cuda", kernels=request.param)
    built = build_model(
        NARROW,
        dtype=torch.bfloat16,
        device="cuda",
        load_format=LoadFormat.DUMMY,
        kernels=kernels,
    )
    built.prepare()
    return built


def draw_requests() -> list[Request]:
    draw = random.Random(0)
    requests = []
    next_block = 1
    for index in range(MAX_NUM_SEQS):
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.7]),
            top_p=draw.choice([1.0, 0.9]),
            presence_penalty=draw.choice([0.0, 0.5]),
            num_logprobs=draw.choice([-1, 1]),
            seed=index,
        )
        prompt = [draw.randrange(4096) for _ in range(draw.randint(1, 300))]
        request = Request(request_id=str(index), prompt_token_ids=prompt, sampling=params)
        request.block_table = list(range(next_block, next_block + MAX_MODEL_LEN // BLOCK_SIZE))
        next_block += MAX_MODEL_LEN // BLOCK_SIZE
        requests.append(request)
    return requests


def run(
    model: DeepseekV3ForCausalLM, *, use_graphs: bool, kv_dtype: torch.dtype
) -> tuple[list[list[int]], torch.Tensor]:
    """Prefill, then decode with each step launched before the last is read."""
    pool = build_kv_pool(model, 1 + MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE, dtype=kv_dtype)
    runner = ModelRunner(model, pool, Sampler(NARROW.vocab_size))
    graphs = StepGraphs(
        model,
        pool,
        vocab_size=NARROW.vocab_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        use_graphs=use_graphs,
    )
    graphs.capture()
    requests, draw = draw_requests(), random.Random(1)
    for request in requests:
        (result,) = runner.execute([ScheduledRequest(request, request.num_prompt_tokens)])
        assert result.sampled is not None
        request.num_computed_tokens = request.num_prompt_tokens
        request.output_token_ids.append(result.sampled.token_id)
    before: PendingStep | None = None
    for _ in range(NUM_STEPS):
        chosen = draw.sample(requests, draw.randint(1, MAX_NUM_SEQS))
        scheduled = [ScheduledRequest(request, 1) for request in chosen]
        for request in chosen:
            request.num_launched_tokens += 1
        pending = graphs.launch_step(scheduled, after=before)
        if before is not None:
            book(before)
        before = pending
    assert before is not None
    book(before)
    return [request.output_token_ids for request in requests], pool.data.view(torch.uint8).cpu()


def book(pending: PendingStep) -> None:
    for result in pending.collect():
        assert result.sampled is not None
        result.request.num_launched_tokens -= 1
        result.request.num_computed_tokens += 1
        result.request.output_token_ids.append(result.sampled.token_id)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_graphs_and_calls_agree_bitwise(
    model: DeepseekV3ForCausalLM, kv_dtype: torch.dtype
) -> None:
    eager_tokens, eager_kv = run(model, use_graphs=False, kv_dtype=kv_dtype)
    graph_tokens, graph_kv = run(model, use_graphs=True, kv_dtype=kv_dtype)
    assert graph_tokens == eager_tokens
    assert torch.equal(graph_kv[1:], eager_kv[1:])  # rows of padding write into block 0, in a race


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_dependent_launches_change_no_bit(
    model: DeepseekV3ForCausalLM, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights, launched both ways; some kernels between ours are other libraries'."""
    tokens, kv = run(model, use_graphs=True, kv_dtype=kv_dtype)
    monkeypatch.setattr(model, "_launches", dependent_launches)
    for use_graphs in (True, False):
        dependent_tokens, dependent_kv = run(model, use_graphs=use_graphs, kv_dtype=kv_dtype)
        assert dependent_tokens == tokens
        assert torch.equal(dependent_kv[1:], kv[1:])


@pytest.mark.parametrize("launches", [nullcontext, dependent_launches])
def test_a_shared_expert_on_a_side_stream_changes_no_bit(
    model: DeepseekV3ForCausalLM,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, kv = run(model, use_graphs=True, kv_dtype=torch.bfloat16)
    monkeypatch.setattr(model, "_launches", launches)
    schedule = SharedSchedule(overlaps=True, side_stream=SideStream(Streams(model.device)))
    for module in model.modules():
        if isinstance(module, MoE):
            monkeypatch.setattr(module, "_shared_schedule", schedule)
    for use_graphs in (True, False):
        other_tokens, other_kv = run(model, use_graphs=use_graphs, kv_dtype=torch.bfloat16)
        assert other_tokens == tokens
        assert torch.equal(other_kv[1:], kv[1:])


def test_a_launch_does_not_wait_for_the_device(model: DeepseekV3ForCausalLM) -> None:
    """Any synchronising call of the host is an error while steps are launched."""
    pool = build_kv_pool(model, 1 + MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE)
    graphs = StepGraphs(
        model,
        pool,
        vocab_size=NARROW.vocab_size,
        max_num_seqs=4,
        max_model_len=MAX_MODEL_LEN,
    )
    graphs.capture()
    requests = draw_requests()[:3]
    for request in requests:
        request.num_computed_tokens = request.num_prompt_tokens
        request.output_token_ids.append(1)
    pending: PendingStep | None = None
    for mode in ("default", "error", "error"):
        scheduled = [ScheduledRequest(request, 1) for request in requests]
        for request in requests:
            request.num_launched_tokens += 1
        torch.cuda.set_sync_debug_mode(mode)
        try:
            following = graphs.launch_step(scheduled, after=pending)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if pending is not None:
            book(pending)
        pending = following


NUM_FAILING, NUM_HEALTHY = 40, 8
"""Of the failing all pairs fit at no expert: 160 of 48 requests with 4 experts each, in room for
128."""


def decode_beside(
    model: DeepseekV3ForCausalLM, *, are_failing: bool, use_graphs: bool
) -> tuple[list[list[int]], torch.Tensor, list[list[bool]]]:
    """Decode healthy requests behind others; their tokens and KV, and who failed in each step."""
    count = NUM_FAILING + NUM_HEALTHY
    pool = build_kv_pool(model, 1 + count * 2, block_size=BLOCK_SIZE)
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(0)))
    graphs = StepGraphs(
        model,
        pool,
        vocab_size=NARROW.vocab_size,
        max_num_seqs=count + 8,
        max_model_len=2 * BLOCK_SIZE,
        buckets=(count + 8,),  # the same products for both, and some padding
        use_graphs=use_graphs,
    )
    graphs.capture()
    requests = []
    for index in range(count):
        prompt = [(13 * index + 7 * i) % 4096 for i in range(20 + index)]
        request = Request(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.7 * (index % 2), seed=index),
            block_table=[1 + 2 * index, 2 + 2 * index],
            num_computed_tokens=len(prompt) - 1,
        )
        requests.append(request)
    if are_failing:
        pool.data[[request.block_table[0] for request in requests[:NUM_FAILING]]] = torch.nan
    failed = []
    for _ in range(6):
        results = graphs.launch_step([ScheduledRequest(request, 1) for request in requests])
        outcome = results.collect()
        failed.append([result.is_failed for result in outcome])
        for result in outcome:
            token = 0 if result.sampled is None else result.sampled.token_id
            result.request.num_computed_tokens += 1
            result.request.output_token_ids.append(token)
    graphs.close()
    healthy = requests[NUM_FAILING:]
    blocks = [block for request in healthy for block in request.block_table]
    kv = pool.data[blocks].view(torch.uint8).cpu()
    return [request.output_token_ids for request in healthy], kv, failed


@pytest.mark.parametrize("use_graphs", [True, False])
def test_many_failing_rows_say_nothing_of_the_others(
    model: DeepseekV3ForCausalLM, use_graphs: bool
) -> None:
    """Rows of NaN are routed like others, each expert once a row: they take nobody's room."""
    dispatcher = MaskedGatheredDispatcher(
        model.kernels, NARROW.n_routed_experts, RankGroup(), max_tokens_per_rank=64
    )
    masked = build_model(
        NARROW,
        dtype=torch.bfloat16,
        device="cuda",
        load_format=LoadFormat.DUMMY,
        kernels=model.kernels,
        execution=Execution(dispatcher=dispatcher),
    )
    masked.prepare()
    expected, expected_kv, nobody = decode_beside(masked, are_failing=False, use_graphs=use_graphs)
    assert not any(map(any, nobody))
    tokens, kv, failed = decode_beside(masked, are_failing=True, use_graphs=use_graphs)
    assert failed == [[True] * NUM_FAILING + [False] * NUM_HEALTHY] * len(failed)
    assert tokens == expected
    assert torch.equal(kv, expected_kv)
