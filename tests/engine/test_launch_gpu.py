"""On a GPU a step is launched without the host ever waiting, and its results are right.

That nothing reads the device, PyTorch itself checks (`set_sync_debug_mode`). What it does not see,
like an event that is waited for, is seen by a device that is kept busy: a launch must return before
the device has begun with the step.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.kv_spec import KVSpec
from engine.batch import ForwardBatch, build_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.config import DeepseekV3Config
from engine.execution import Execution
from engine.formats import deep_gemm
from engine.formats.triton_gemm.limits import DeviceLimits
from engine.host_copy import HostCopies, upload
from engine.kernels.base import Kernels
from engine.kernels.create import KernelSet, create_kernels
from engine.memory.kv_pool import KVPool
from engine.operations import do_nothing
from engine.parallel.gathered_dispatcher import GatheredDispatcher
from engine.parallel.groups import RankGroup
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.row_formats import ExpertShare, choose_row_format
from engine.pending_step import StepResult
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.formats.fp8 import fp8_of
from tests.engine.relative_error import relative_error
from tests.engine.tiny import tiny_config, write_checkpoint

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
        meanwhile: Callable[[], None] = do_nothing,
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
    pool = KVPool(16, 1, BLOCK_SIZE, KVSpec.shared(HIDDEN), device=device)
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


CONFIG = tiny_config(
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=1024,
    moe_intermediate_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=4096,
    # Every token uses every expert: a rounding that changes the choice would change everything.
    topk_group=2,
    num_experts_per_tok=8,
    num_nextn_predict_layers=0,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)
NUM_TOKENS = 2000


@pytest.fixture(params=[KernelSet.TRITON, KernelSet.HOPPER])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    pytest.importorskip("triton")
    if request.param is KernelSet.HOPPER and not deep_gemm.is_available():
        pytest.skip("needs a Hopper GPU with DeepGEMM")
    if not DeviceLimits.of("cuda").has_fp8:
        pytest.skip("this GPU has no FP8")
    return create_kernels("cuda", kernels=request.param)


def make_experts(kernels: Kernels, num_ranks: int, tmp_path: Path) -> ModelRunner:
    """A model in FP8 with five layers of experts, on one rank.

    As one of several it lays out rows for its share of the experts and holds all of them, so that
    most rows are behind the capacity.
    """
    config = DeepseekV3Config.from_dir(write_checkpoint(tmp_path, CONFIG, fp8=True))
    share = ExpertShare(first=0, num_local=config.n_routed_experts, num_ranks=num_ranks)
    dispatcher = GatheredDispatcher if num_ranks > 1 else LocalDispatcher
    rows = choose_row_format(fp8_of(kernels), kernels.ops, share)
    execution = Execution(dispatcher=dispatcher(rows, RankGroup()))
    model = build_model(
        tmp_path, dtype=torch.bfloat16, device="cuda", kernels=kernels, execution=execution
    )
    assert not model.waits_for_counts
    return ModelRunner(model, build_kv_pool(model, 80), Sampler(config.vocab_size))


def schedule_prompts() -> list[ScheduledRequest]:
    generator = torch.Generator().manual_seed(1)
    return [
        ScheduledRequest(
            Request(
                request_id=str(index),
                prompt_token_ids=torch.randint(4096, (count,), generator=generator).tolist(),
                sampling=SamplingParams(temperature=0.0),
                block_table=list(range(1 + 40 * index, 1 + 40 * index + -(-count // 64))),
            ),
            count,
        )
        for index, count in enumerate([NUM_TOKENS - 300, 300])
    ]


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_prefill_step_with_experts_is_launched_before_the_device_begins(
    kernels: Kernels, num_ranks: int, tmp_path: Path
) -> None:
    runner = make_experts(kernels, num_ranks, tmp_path)
    expected = [result.sampled for result in runner.execute(schedule_prompts())]
    for _ in range(2):  # first calls compile and wait for memory
        runner.execute(schedule_prompts())
    torch.cuda.synchronize()
    begins = torch.cuda.Event()  # type: ignore[no-untyped-call]
    turns: list[int] = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # cycles: two seconds
        begins.record()
        pending = runner.launch(schedule_prompts(), meanwhile=lambda: turns.append(1))
        is_ahead = not begins.query()  # type: ignore[no-untyped-call]
        is_done = pending.is_done
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert is_ahead, "the launch waited for the device"
    assert not is_done
    assert len(turns) >= 2 * 5, "others have their turn at least twice a layer of experts"
    assert [result.sampled for result in pending.collect()] == expected


def test_rows_behind_the_capacity_change_no_token(kernels: Kernels, tmp_path: Path) -> None:
    """Nearly all rows of a rank that holds eight times its share are behind the capacity."""
    logits = []
    for num_ranks in (1, 8):
        runner = make_experts(kernels, num_ranks, tmp_path / str(num_ranks))
        with torch.inference_mode():
            batch = build_forward_batch(schedule_prompts(), 64, "cuda")
            hidden = runner.model.forward(batch, runner.kv_pool)
            logits.append(runner.model.compute_logits(hidden[batch.logits_indices]))
    # Sums of another order are rounded to e4m3 in every layer; a wrong expert gives about 1.
    assert relative_error(logits[1], logits[0]) < 0.1


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


@pytest.mark.gpu
def test_results_behind_a_wake_up_are_waited_for() -> None:
    device = torch.device("cuda")
    copies, matrix = HostCopies(device), torch.randn(4096, 4096, device=device)
    early = copies.add(matrix[:1])
    copies.nearly_there()
    product = matrix
    for _ in range(20):  # some milliseconds
        product = torch.nn.functional.normalize(product @ matrix, dim=0)
    late = copies.add(product[:1])
    copies.close()
    copies.wait()
    assert copies.is_done
    assert torch.equal(late, product[:1].cpu())
    assert torch.equal(early, matrix[:1].cpu())
