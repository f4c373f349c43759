"""A step is launched without a number read from the device, where that is promised; only there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.boot.build import build_kv_pool
from engine.config import DeepseekV3Config
from engine.execution import Execution
from engine.formats.expert_rows import AlignedRows, ExpertRows
from engine.formats.fp8_rows import Activation
from engine.kernels.portable import portable_kernels
from engine.layers.moe import MoE
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.ops.activation import SILU_AND_MUL
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.deep_ep_buffers import LowLatencyBuffer, NormalBuffer, NormalConfigs
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_normal_dispatcher import DeepEPNormalDispatcher
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.gathered_dispatcher import GatheredDispatcher
from engine.parallel.groups import RankGroup
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.nvlink.dispatcher import NvlinkDispatcher
from engine.parallel.row_formats import AlignedQuantized, ExpertShare, PlainRows
from engine.parallel.short_rows import ShortQuantized
from engine.parallel.token_dispatcher import TokenDispatcher
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.weights.dummy import fill_with_dummy_weights
from runtime.sampling import SamplingParams
from tests.engine.formats.fp8 import fp8_of, quantize
from tests.engine.host_reads import (
    Device,
    HostReadError,
    host_reads_allowed,
    refuse_host_reads,
)
from tests.engine.parallel.fake_deep_ep import FakeLibraryBuffer
from tests.engine.parallel.thread_ranks import Meetings
from tests.engine.tiny import tiny_config, write_checkpoint

KERNELS: Any = Device(portable_kernels(has_fp8=True))
CODEC: Any = fp8_of(KERNELS).rows
NUM_EXPERTS, HIDDEN, NUM_TOKENS = 8, 128, 600
READS_OF_A_TENSOR: list[Callable[[Tensor], object]] = [
    lambda x: x.tolist(),
    lambda x: x[0].item(),
    lambda x: int(x[0]),
    lambda x: bool(x[0]),
    lambda x: x[x > 1],
    lambda x: (x > 1).nonzero(),
    lambda x: torch.where(x > 1),
    lambda x: torch.bincount(x),
    lambda x: torch.unique(x),
    lambda x: x.repeat_interleave(x),
    lambda x: x.cpu(),
    lambda x: np.asarray(x),
    lambda x: [0] * x[1],
    lambda x: x.masked_select(x > 1),
    lambda x: torch.equal(x, x),
]


@pytest.mark.parametrize("read", READS_OF_A_TENSOR)
def test_no_way_to_a_number_is_overlooked(read: Callable[[Tensor], object]) -> None:
    x = torch.tensor([1, 2, 3])
    with refuse_host_reads(), pytest.raises(HostReadError):
        read(x)
    with refuse_host_reads():
        Device(portable_kernels()).ops[SILU_AND_MUL](torch.ones(2, 4))
        assert len(x) == 3
        assert x[1:].shape == (2,)
        x[torch.tensor([0, 2])] += 1
        torch.where(x > 1, x, 0)
    assert x.tolist() == [2, 2, 4]


def fp8(num_ranks: int) -> AlignedQuantized:
    return AlignedQuantized(KERNELS.ops, CODEC, share(num_ranks))


def short(num_ranks: int) -> ShortQuantized:
    return ShortQuantized(ops=KERNELS.ops, aligned=fp8(num_ranks), max_tokens=256)


def share(num_ranks: int) -> ExpertShare:
    return ExpertShare(first=0, num_local=NUM_EXPERTS, num_ranks=num_ranks)


PLAIN = PlainRows(share(1))


def low_latency() -> DeepEPLowLatencyDispatcher:
    shape = LowLatencyShape(
        num_ranks=1, num_experts=NUM_EXPERTS, max_tokens_per_rank=640, hidden_size=HIDDEN
    )
    library: Any = Device(FakeLibraryBuffer(0, Meetings(1), shape))
    return DeepEPLowLatencyDispatcher(LowLatencyBuffer(library, shape))


def normal() -> DeepEPNormalDispatcher:
    shape = NormalShape(num_ranks=1, num_experts=NUM_EXPERTS, hidden_size=HIDDEN)
    library: Any = Device(FakeLibraryBuffer(0, Meetings(1), shape))
    return DeepEPNormalDispatcher(
        KERNELS, NormalBuffer(library, shape, NormalConfigs(dispatch=None, combine=None))
    )


QUIET: list[Callable[[], TokenDispatcher[Any]]] = [
    lambda: LocalDispatcher(fp8(1), RankGroup()),
    lambda: LocalDispatcher(fp8(8), RankGroup()),
    lambda: GatheredDispatcher(fp8(1), RankGroup()),
    lambda: GatheredDispatcher(fp8(8), RankGroup()),
    lambda: LocalDispatcher(short(1), RankGroup()),
    lambda: GatheredDispatcher(short(8), RankGroup()),
    lambda: MaskedGatheredDispatcher(KERNELS, NUM_EXPERTS, RankGroup(), max_tokens_per_rank=640),
    low_latency,
]
WAITING: list[Callable[[], TokenDispatcher[Any]]] = [
    lambda: LocalDispatcher(PLAIN, RankGroup()),
    lambda: GatheredDispatcher(PLAIN, RankGroup()),
    lambda: AllToAllDispatcher(PLAIN, RankGroup()),
    lambda: AllToAllDispatcher(fp8(1), RankGroup()),
]


def start(dispatcher: TokenDispatcher[Any]) -> Any:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(3).indices
    rows: Activation = quantize(KERNELS, hidden) if dispatcher.takes_quantized else hidden
    return rows, ids, torch.rand(NUM_TOKENS, 3, generator=generator)


@pytest.mark.parametrize("make", QUIET)
def test_tokens_travel_without_a_number_read(make: Callable[[], TokenDispatcher[Any]]) -> None:
    dispatcher = make()
    assert not dispatcher.waits_for_counts
    routing = start(dispatcher)
    with refuse_host_reads():
        rows, handle = dispatcher.start_dispatch(*routing).wait()
        if isinstance(rows, AlignedRows):
            out = torch.zeros(rows.expert_M.shape[0], HIDDEN, dtype=torch.bfloat16)
        else:
            assert not isinstance(rows, ExpertRows)
            out = torch.zeros(rows.data_LMD.shape, dtype=torch.bfloat16)
        result = dispatcher.start_combine(out, handle, None).wait()
    assert result.shape == (NUM_TOKENS, HIDDEN)


def test_on_a_gpu_tokens_travel_by_the_same_code() -> None:
    """A branch for GPUs, with events to wait for, would not be seen here."""
    classes = LocalDispatcher, GatheredDispatcher, MaskedGatheredDispatcher, AlignedQuantized
    for source in [inspect.getsource(each) for each in classes]:
        assert "cuda" not in source
        assert "synchronize" not in source


@pytest.mark.parametrize("make", WAITING)
def test_who_waits_for_counts_says_so(make: Callable[[], TokenDispatcher[Any]]) -> None:
    dispatcher = make()
    assert dispatcher.waits_for_counts
    routing = start(dispatcher)
    with refuse_host_reads(), pytest.raises(HostReadError):
        dispatcher.start_dispatch(*routing).wait()


def test_what_libraries_do_is_declared_too() -> None:
    assert normal().waits_for_counts, "the library's call returns when it has counts"
    assert not NvlinkDispatcher.waits_for_counts, "graphs hold it"


CONFIG = tiny_config(
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    num_nextn_predict_layers=0,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)
EVERYTHING = SamplingParams(
    temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3,
    frequency_penalty=0.3, min_tokens=3, stop_token_ids=(4,), logit_bias={3: 1.0},
    num_logprobs=2, num_prompt_logprobs=1,
)  # fmt: skip


def build(tmp_path: Path, execution: Execution | None = None) -> ModelRunner:
    config = DeepseekV3Config.from_dir(write_checkpoint(tmp_path, CONFIG, fp8=True))
    model = DeepseekV3ForCausalLM(
        config, dtype=torch.bfloat16, kernels=KERNELS, execution=execution
    ).eval()
    fill_with_dummy_weights(model)
    pool = build_kv_pool(model, 20, block_size=8)
    return ModelRunner(model, pool, Sampler(config.vocab_size))


def launch(runner: ModelRunner) -> list[int]:
    """Launch a chunk, and behind it the rest with other requests; return the tokens."""
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=[index + 1, *range(2, 20)],
            sampling=sampling,
            block_table=[1 + 4 * index, 2 + 4 * index, 3 + 4 * index],
        )
        for index, sampling in enumerate([SamplingParams(temperature=0.0), EVERYTHING])
    ]
    first = runner.launch([ScheduledRequest(requests[0], 8)])
    requests[0].num_launched_tokens = 8
    second = runner.launch([ScheduledRequest(requests[0], 11), ScheduledRequest(requests[1], 19)])
    with host_reads_allowed():
        assert first.collect()[0].sampled is None
        sampled = [result.sampled for result in second.collect()]
    return [token.token_id for token in sampled if token is not None]


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_model_says_whether_its_steps_wait(tmp_path: Path, num_ranks: int) -> None:
    for dispatcher, waits in (
        (LocalDispatcher(fp8(num_ranks), RankGroup()), False),
        (normal(), True),
    ):
        model = build(tmp_path / str(waits), Execution(dispatcher=dispatcher)).model
        assert isinstance(model, DeepseekV3ForCausalLM)
        assert not model.waits_for_counts, "a CPU's launch is the step itself"
        model.device = torch.device("cuda")
        assert model.waits_for_counts == waits


def test_a_prefill_step_with_experts_in_fp8_reads_nothing(tmp_path: Path) -> None:
    runner = build(tmp_path)
    assert isinstance(runner.model, DeepseekV3ForCausalLM)
    assert sum(isinstance(module, MoE) for module in runner.model.modules()) == 3
    with refuse_host_reads():
        tokens = launch(runner)
    assert len(tokens) == 2
    assert tokens == launch(runner)
