"""On a GPU, captured steps of prompts do what the same work does when it is called."""

import pytest
import torch
from torch import Tensor

from engine.batch import build_forward_batch
from engine.kernels.create import KernelSet
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from tests.engine.graphs.chunks import prompt_graphs, run_step
from tests.engine.graphs.invented_chunks import (
    BLOCK_SIZE,
    MAX_SEQS,
    assert_launches_do_not_wait,
    invent_model,
    make_pool,
    schedule,
)
from tests.engine.relative_error import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SIZES = (64, 512, 1024, 2048)
STEPS = (
    [(2048, 2048)],
    [(700, 700), (300, 300), (3, 3)],
    [(64, 64)],
    [(63, 63)],
    [(1024, 1024), (1000, 1000)],
    [(129, 129), (2, 2)],
    [(700, 1700), (900, 900), (400, 1900)],
    [(1500, 3500)],
)
"""Queries and positions of each prompt."""


@pytest.fixture(scope="module", params=[None, KernelSet.TRITON], ids=["fastest", "triton"])
def model(request: pytest.FixtureRequest) -> DeepseekV3ForCausalLM:
    return invent_model(request.param)


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
            length = 2049 + 200 * seed
            longer = build_forward_batch(schedule([(length, length)], 99), BLOCK_SIZE, "cuda")
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
    assert_launches_do_not_wait(model, (512, 1024), [(400, 400), (500, 1300)])
