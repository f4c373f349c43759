"""On a GPU a step is launched without the host ever waiting, and its results are right."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch
from engine.host_copy import HostCopies, upload
from engine.memory.kv_pool import KVPool
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner, StepResult
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams

pytestmark = pytest.mark.gpu

VOCAB = 50
HIDDEN = 8
BLOCK_SIZE = 4


class TokenModel:
    """Its hidden states depend on the input tokens alone, which is enough to see which they are."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator).to(device)
        self.head = torch.randn(VOCAB, HIDDEN, generator=generator).to(device)

    def forward(
        self,
        batch: ForwardBatch,
        kv_pool: KVPool,
        *,
        on_layer_done: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        return self.embedding[batch.input_ids] + torch.sin(batch.positions)[:, None]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T


EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    min_tokens=3,
    stop_token_ids=(4,),
    logit_bias={3: 1.0},
    num_logprobs=2,
    num_prompt_logprobs=1,
)


def make_requests() -> list[Request]:
    return [
        Request(
            request_id=str(index),
            prompt_token_ids=[1 + index, 2, 3],
            sampling=sampling,
            block_table=[1 + 4 * index, 2 + 4 * index],
        )
        for index, sampling in enumerate([SamplingParams(temperature=0.0), EVERYTHING])
    ]


def make_runner(device: torch.device) -> ModelRunner:
    pool = KVPool(16, 1, BLOCK_SIZE, HIDDEN, device=device)
    return ModelRunner(TokenModel(device), pool, Sampler(VOCAB))


def run_two_steps(runner: ModelRunner) -> list[list[StepResult]]:
    """Launch the prompts and, before they are read, a step on their tokens."""
    requests = make_requests()
    plan = [ScheduledRequest(request, 3) for request in requests]
    first = runner.launch(plan)
    for request in requests:
        request.num_launched_tokens = 3
    second = runner.launch([ScheduledRequest(request, 1) for request in requests], after=first)
    steps = [first.collect(), second.collect()]
    if runner.kv_pool.device.type == "cuda":
        assert second.idle_s is not None
    return steps


def test_launching_never_makes_the_host_wait() -> None:
    runner = make_runner(torch.device("cuda"))
    warm = run_two_steps(runner)  # first calls may wait for memory
    requests = make_requests()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = runner.launch([ScheduledRequest(request, 3) for request in requests])
        for request in requests:
            request.num_launched_tokens = 3
        second = runner.launch([ScheduledRequest(request, 1) for request in requests], after=first)
        runner.run_dummy()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [r.sampled for r in first.collect()] == [r.sampled for r in warm[0]]
    assert [r.sampled for r in second.collect()] == [r.sampled for r in warm[1]]


def test_the_tokens_are_those_of_a_cpu() -> None:
    with_gpu = run_two_steps(make_runner(torch.device("cuda")))
    expected = run_two_steps(make_runner(torch.device("cpu")))
    for step, wanted in zip(with_gpu, expected, strict=True):
        tokens = [result.sampled and result.sampled.token_id for result in step]
        assert tokens == [result.sampled and result.sampled.token_id for result in wanted]
        for result, other in zip(step, wanted, strict=True):
            logprobs = [entry.logprob for entry in result.prompt_logprobs]
            assert logprobs == pytest.approx(
                [entry.logprob for entry in other.prompt_logprobs], abs=1e-4
            )


@pytest.mark.gpu
def test_neither_way_makes_the_host_wait() -> None:
    arrays = [np.arange(5), np.ones((2, 3), dtype=np.float32)]
    device = torch.device("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        tensors = upload(arrays, device)
        copies = HostCopies(device)
        hosts = [copies.add(tensor + 1) for tensor in tensors]
        copies.close()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copies.wait()
    assert copies.is_done
    for array, host in zip(arrays, hosts, strict=True):
        np.testing.assert_array_equal(host.numpy(), array + 1)
