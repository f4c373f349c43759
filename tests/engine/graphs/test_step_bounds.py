"""A block or token that is not there is refused, by its request, before anything is launched."""

import pytest
import torch

from engine.batch import StepBounds, build_forward_batch
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest
from runtime.errors import InternalError
from runtime.sampling import SamplingParams
from tests.engine.graphs.test_step_graphs import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Worker,
    make_graphs,
    make_runner,
    model,
)

__all__ = ["model"]
VOCAB_SIZE = 128


def make_request(name: str) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[3, 14, 15, 92, 65],
        sampling=SamplingParams(temperature=0.0),
    )


@pytest.mark.parametrize("with_graphs", [False, True], ids=["runner", "graphs"])
@pytest.mark.parametrize("kind", ["KV block", "token"])
@pytest.mark.parametrize("beyond", [0, 10**6, -1])
def test_a_decode_step_is_refused_by_the_request(
    model: DeepseekV3ForCausalLM, with_graphs: bool, kind: str, beyond: int
) -> None:
    runner = make_runner(model)
    worker = Worker(runner, make_graphs(model, runner.kv_pool) if with_graphs else None)
    requests = [make_request("good"), make_request("bad")]
    worker.start(requests)
    bad, end = requests[1], NUM_BLOCKS if kind == "KV block" else VOCAB_SIZE
    number = end + beyond if beyond >= 0 else -1
    if kind == "KV block":
        bad.block_table[1] = number
    else:
        bad.output_token_ids[-1] = number
    before = runner.kv_pool.data.clone()
    with pytest.raises(InternalError, match=f"request 'bad' has {kind} {number}, and") as caught:
        worker.launch(requests)
    assert caught.value.request_id == "bad"
    assert torch.equal(runner.kv_pool.data, before)


def test_a_prompt_is_refused_by_the_request() -> None:
    bounds = StepBounds(num_blocks=8, vocab_size=VOCAB_SIZE)
    good, bad = make_request("good"), make_request("bad")
    good.block_table, bad.block_table = [1, 2], [3, 7]
    scheduled = [ScheduledRequest(request, 5) for request in (good, bad)]
    build_forward_batch(scheduled, BLOCK_SIZE, bounds=bounds)
    bad.block_table = [3, 8]
    with pytest.raises(InternalError, match=r"'bad' has KV block 8, and there are 0\.\.7"):
        build_forward_batch(scheduled, BLOCK_SIZE, bounds=bounds)
    bad.block_table, bad.prompt_token_ids[2] = [3, 7], VOCAB_SIZE
    with pytest.raises(InternalError, match=r"'bad' has token 128, and there are 0\.\.127"):
        build_forward_batch(scheduled, BLOCK_SIZE, bounds=bounds)
