"""On a GPU, masks and masked steps give what they give elsewhere, also launched ahead."""

from __future__ import annotations

import pytest
import torch

from engine.boot.build import LoadFormat, build_kv_pool, build_model
from engine.graphs.step_graphs import StepGraphs
from engine.model.spec import ServedModel
from engine.pending_step import PendingStep
from engine.request import ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.graph_sampler import GraphSampler, SamplingRows, SamplingStage
from engine.sampling.sampler import Sampler
from engine.sampling.token_mask import MASKED, mask_tokens
from tests.engine.graphs.test_masked_steps import constrain, follows
from tests.engine.graphs.test_step_graphs import Worker
from tests.engine.graphs.test_step_graphs_gpu import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_STEPS,
    draw_requests,
)
from tests.engine.graphs.uneven_main import NARROW
from tests.engine.sampling.test_token_mask import is_allowed, make_mask

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def test_masked_logits_are_those_of_the_cpu() -> None:
    mask = make_mask(70, 129280, 3)
    logits = torch.randn(70, 129280, generator=torch.Generator().manual_seed(3))
    on_device = logits.cuda()
    mask_tokens(logits, mask)
    mask_tokens(on_device, mask)
    torch.testing.assert_close(on_device.cpu(), logits, rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [50, 129280])
def test_the_fused_sampler_takes_masked_logits(temperature: float, top_k: int) -> None:
    """Also where fewer tokens are left than a top_k wants."""
    num_rows, vocab_size = 8, 129280
    mask = make_mask(num_rows, vocab_size, 5)
    mask.words[::2] = 0
    mask.words[::2, 7] = 0b1011  # three tokens
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 3
    chosen = {}
    for device in ("cpu", "cuda"):
        sampler = GraphSampler(vocab_size, num_rows, device)
        values = logits.clone().to(device)
        mask_tokens(values, mask)
        rows = _rows(num_rows, device, temperature=temperature, top_k=top_k)
        chosen[device] = sampler.choose(values, rows, SamplingStage.FULL).tolist()
    assert chosen["cuda"] == chosen["cpu"]
    assert all(is_allowed(mask, row, token) for row, token in enumerate(chosen["cuda"]))
    assert float(logits.min()) > MASKED


def _rows(num_rows: int, device: str, *, temperature: float, top_k: int) -> SamplingRows:
    def floats(value: float) -> torch.Tensor:
        return torch.full((num_rows,), value, device=device)

    return SamplingRows(
        slot=torch.arange(num_rows, device=device),
        output_index=torch.arange(num_rows, device=device),
        mixed_seed=torch.arange(num_rows, device=device) * 7919,
        top_k=torch.full((num_rows,), top_k, device=device),
        temperature=floats(temperature),
        top_p=floats(0.9),
        min_p=floats(0.0),
        repetition=floats(1.1),
        frequency=floats(0.2),
        presence=floats(0.1),
    )


def test_captured_and_masked_steps_follow_each_other() -> None:
    """The same steps with graphs that are replayed and with the same work called."""
    model = build_model(NARROW, dtype=torch.bfloat16, device="cuda", load_format=LoadFormat.DUMMY)
    model.prepare()
    outputs = [_run(model, use_graphs=use_graphs) for use_graphs in (False, True)]
    assert outputs[0] == outputs[1]
    assert all(follows(tokens) for tokens in outputs[0][::2])


def _run(model: ServedModel, *, use_graphs: bool) -> list[list[int]]:
    """Every other request is bound; every third step leaves those out, and replays its head."""
    pool = build_kv_pool(model, 1 + MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE)
    graphs = StepGraphs(
        model,
        pool,
        vocab_size=NARROW.vocab_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        use_graphs=use_graphs,
    )
    graphs.capture()
    requests = draw_requests()
    for request in requests[::2]:
        constrain(request, vocab_size=NARROW.vocab_size)
    worker = Worker(ModelRunner(model, pool, Sampler(NARROW.vocab_size)), graphs)
    scheduled = [ScheduledRequest(item, item.num_prompt_tokens) for item in requests]
    worker.book(worker.runner.execute(scheduled))
    pending: PendingStep | None = None
    for number in range(NUM_STEPS):
        step = worker.launch(requests[1::2] if number % 3 == 2 else requests, pending)
        if pending is not None:
            worker.collect(pending)
        pending = step
    assert pending is not None
    worker.collect(pending)
    graphs.close()
    return [request.output_token_ids for request in requests]
