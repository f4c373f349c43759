"""On a GPU, captured steps of prompts do what the same work does when it is called."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.batch import build_forward_batch
from engine.boot.build import LoadFormat, build_kv_pool, build_model
from engine.graphs.chunk_graphs import capture_chunks
from engine.kernels.create import KernelSet, create_kernels
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.graphs.chunks import prompt_graphs, run_step
from tests.engine.graphs.uneven_main import NARROW
from tests.engine.relative_error import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

BLOCK_SIZE, MAX_SEQS, MAX_MODEL_LEN, SIZES = 64, 4, 4096, (64, 512, 1024, 2048)
WIDTH = MAX_MODEL_LEN // BLOCK_SIZE
NUM_BLOCKS = 1 + MAX_SEQS * WIDTH
# Every token uses every expert: a rounding that changes the choice would change everything.
CONFIG = replace(
    NARROW,
    num_attention_heads=16,
    n_routed_experts=8,
    n_group=2,
    topk_group=2,
    num_experts_per_tok=8,
)
STEPS = (
    [(2048, 0)],
    [(700, 0), (300, 0), (3, 0)],
    [(64, 0)],
    [(63, 0)],
    [(1024, 0), (1000, 0)],
    [(129, 0), (2, 0)],
    [(700, 1000), (900, 0), (400, 1500)],
    [(1500, 2000)],
)
"""New and cached tokens of each prompt."""


@pytest.fixture(scope="module", params=[None, KernelSet.TRITON], ids=["fastest", "triton"])
def model(request: pytest.FixtureRequest) -> DeepseekV3ForCausalLM:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    built = build_model(
        CONFIG,
        dtype=torch.bfloat16,
        device="cuda",
        load_format=LoadFormat.DUMMY,
        kernels=create_kernels("cuda", kernels=request.param),
    )
    assert isinstance(built, DeepseekV3ForCausalLM)
    built.prepare()
    return built


def make_pool(model: DeepseekV3ForCausalLM, kv_dtype: torch.dtype) -> KVPool:
    pool = build_kv_pool(model, NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=kv_dtype)
    generator = torch.Generator("cuda").manual_seed(1)
    for index in range(pool.num_layers):
        layer = pool.layer(index)
        drawn = torch.randn(layer.shape, generator=generator, device="cuda")
        layer.copy_(drawn.to(layer.dtype))
    return pool


def schedule(lengths: list[tuple[int, int]], seed: int) -> list[ScheduledRequest]:
    draw = random.Random(seed)
    blocks = draw.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    return [
        ScheduledRequest(
            Request(
                request_id=str(index),
                prompt_token_ids=[draw.randrange(4096) for _ in range(count + cached)],
                sampling=SamplingParams(temperature=0.7, seed=index),
                block_table=blocks[index * WIDTH : (index + 1) * WIDTH],
                num_computed_tokens=cached,
            ),
            count,
        )
        for index, (count, cached) in enumerate(lengths)
    ]


def run(
    model: DeepseekV3ForCausalLM, kv_dtype: torch.dtype, *, use_graphs: bool | None
) -> tuple[list[Tensor], Tensor]:
    """Return hidden states of all steps, and the pool; None for `use_graphs` runs them plainly.

    A step longer than all that is captured runs between, so that memory of ordinary steps moves.
    """
    pool = make_pool(model, kv_dtype)
    kinds = [
        prompt_graphs(
            model,
            pool,
            SIZES,
            max_num_seqs=MAX_SEQS,
            max_num_cached=num_cached,
            use_graphs=bool(use_graphs),
        )
        for num_cached in (0, 3000)
    ]
    if use_graphs is not None:
        for graphs in kinds:
            graphs.capture()
    hidden = []
    with torch.inference_mode():
        for seed, lengths in enumerate(STEPS):
            longer = build_forward_batch(schedule([(2049 + 200 * seed, 0)], 99), BLOCK_SIZE, "cuda")
            assert not any(graphs.kind_of(longer) for graphs in kinds)
            model.forward(longer, pool)
            batch = build_forward_batch(schedule(lengths, seed), BLOCK_SIZE, "cuda")
            graphs = next(each for each in kinds if each.kind_of(batch))
            found = model.forward(batch, pool) if use_graphs is None else run_step(graphs, batch)
            hidden.append(found.clone())
    torch.cuda.synchronize()
    for graphs in kinds:
        graphs.close()
    return hidden, pool.data[1:].view(torch.uint8).cpu()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_graphs_and_calls_agree_bitwise(
    model: DeepseekV3ForCausalLM, kv_dtype: torch.dtype
) -> None:
    called, called_kv = run(model, kv_dtype, use_graphs=False)
    replayed, replayed_kv = run(model, kv_dtype, use_graphs=True)
    assert all(map(torch.equal, replayed, called))
    assert torch.equal(replayed_kv, called_kv)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_captured_prompts_are_close_to_plain_ones(
    model: DeepseekV3ForCausalLM, kv_dtype: torch.dtype
) -> None:
    plain, _ = run(model, kv_dtype, use_graphs=None)
    captured, _ = run(model, kv_dtype, use_graphs=True)
    errors = [relative_error(*pair) for pair in zip(captured, plain, strict=True)]
    print(f"relative errors {errors}")
    # GEMMs of other numbers of rows round other activations up to e4m3. Rows of something else
    # differ by 1.4.
    assert max(errors) < 0.3


def test_a_launch_does_not_wait_for_the_device(model: DeepseekV3ForCausalLM) -> None:
    """Any synchronising call of the host is an error while prompts are launched."""
    runner = ModelRunner(model, make_pool(model, torch.bfloat16), Sampler(CONFIG.vocab_size))
    captured, close = capture_chunks(
        runner, model, sizes=(512, 1024), max_num_seqs=MAX_SEQS, max_model_len=MAX_MODEL_LEN
    )
    pending = []
    for mode in ("default", "error", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            pending.append(captured.launch(schedule([(400, 0), (500, 800)], 0)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    tokens = [[result.sampled for result in step.collect()] for step in pending]
    assert tokens[0][0] is not None
    assert tokens[0] == tokens[1] == tokens[2]
    close()
