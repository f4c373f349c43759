"""A whole MoE layer over 8 to 72 ranks with redundant slots gives what one rank alone gives.

Gate, placement, dispatch, experts in FP8, shared expert, combine; the ranks are threads.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import DeepseekV3Config
from engine.experts.placement import ExpertPlacement
from engine.kernels.portable import portable_kernels
from engine.kernels.reference import quantize_rows
from engine.layers.context import LayerContext
from engine.layers.moe import MoE, create_expert_dispatcher
from engine.layers.norm import Normed
from engine.operations import run
from engine.parallel.deep_ep_buffers import LowLatencyBuffer, NormalBuffer, NormalConfigs
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_normal_dispatcher import DeepEPNormalDispatcher
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.groups import ProcessGroups
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.weights.fp8 import quantize_block
from experts.balance import balance_experts
from tests.engine.formats.fp8 import fp8_of
from tests.engine.parallel.fake_deep_ep import FakeLibraryBuffer
from tests.engine.parallel.thread_ranks import Meetings, run_ranks, thread_groups
from tests.engine.relative_error import relative_error
from tests.engine.tiny import tiny_config

HIDDEN, WIDTH, NUM_EXPERTS, NUM_SLOTS, MAX_TOKENS = 128, 128, 256, 288, 16
CONFIG = DeepseekV3Config.from_hf(
    tiny_config(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        n_routed_experts=NUM_EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
)
KERNELS = portable_kernels(has_fp8=True)

Make = Callable[[ProcessGroups, Meetings], Any]


def context(groups: ProcessGroups) -> LayerContext:
    return LayerContext(
        dtype=torch.bfloat16, groups=groups, kernels=KERNELS, number_format=fp8_of(KERNELS)
    )


@pytest.fixture(scope="module")
def alone() -> MoE:
    """The layer on one rank, one slot per expert, with random weights."""
    generator = torch.Generator().manual_seed(5)
    ctx = context(ProcessGroups())
    placement = ExpertPlacement.identity(NUM_EXPERTS)
    layer = MoE(CONFIG, ctx, placement, create_expert_dispatcher(CONFIG, ctx, NUM_EXPERTS))
    for module in layer.modules():
        weight, scale = getattr(module, "weight", None), getattr(module, "scale", None)
        if weight is not None and scale is not None:
            flat = weight.view(-1, *weight.shape[-2:])
            for index, part in enumerate(flat):
                drawn = torch.randn(part.shape, generator=generator) / part.shape[1] ** 0.5
                part.data.view(torch.uint8).copy_(quantize_block(drawn)[0].view(torch.uint8))
                scale.view(-1, *scale.shape[-2:])[index].data.copy_(quantize_block(drawn)[1])
    layer.gate.weight.data.copy_(torch.randn(layer.gate.weight.shape, generator=generator))
    layer.gate.e_score_correction_bias.data.copy_(torch.linspace(-0.1, 0.1, NUM_EXPERTS))
    return layer


def rank_layer(alone: MoE, groups: ProcessGroups, slots: tuple[int, ...], dispatcher: Any) -> MoE:
    """The same layer as this rank of many holds it."""
    placement = ExpertPlacement.from_physical(slots, NUM_EXPERTS)
    layer = MoE(CONFIG, context(groups), placement, dispatcher)
    layer.gate, layer.shared_experts = alone.gate, alone.shared_experts
    share = len(slots) // groups.ep_group.size
    mine = list(slots[groups.rank * share : (groups.rank + 1) * share])
    for target, source in (
        (layer.experts.up, alone.experts.up),
        (layer.experts.down, alone.experts.down),
    ):
        assert target.scale is not None
        assert source.scale is not None
        target.weight.data.view(torch.uint8).copy_(source.weight.data.view(torch.uint8)[mine])
        target.scale.data.copy_(source.scale.data[mine])
    return layer


def make_low_latency(groups: ProcessGroups, meetings: Meetings) -> DeepEPLowLatencyDispatcher:
    shape = LowLatencyShape(
        num_ranks=groups.ep_group.size,
        num_experts=NUM_SLOTS,
        max_tokens_per_rank=MAX_TOKENS,
        hidden_size=HIDDEN,
    )
    library = FakeLibraryBuffer(groups.rank, meetings, shape)
    return DeepEPLowLatencyDispatcher(LowLatencyBuffer(library, shape))


def make_normal(groups: ProcessGroups, meetings: Meetings) -> DeepEPNormalDispatcher:
    shape = NormalShape(num_ranks=groups.ep_group.size, num_experts=NUM_SLOTS, hidden_size=HIDDEN)
    library = FakeLibraryBuffer(groups.rank, meetings, shape)
    configs = NormalConfigs(dispatch=None, combine=None)
    return DeepEPNormalDispatcher(KERNELS, NormalBuffer(library, shape, configs))


def make_gathered(groups: ProcessGroups, meetings: Meetings) -> MaskedGatheredDispatcher:
    share = NUM_SLOTS // groups.ep_group.size
    return MaskedGatheredDispatcher(KERNELS, share, groups.ep_group, max_tokens_per_rank=MAX_TOKENS)


def draw(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn((5 * rank) % 4, HIDDEN, generator=generator).bfloat16()


def run_layer(layer: MoE, rows_TD: Tensor) -> Tensor:
    return run(layer(Normed(plain_TD=rows_TD, fp8_TD=quantize_rows(rows_TD))))


@pytest.mark.parametrize("make", [make_low_latency, make_normal, make_gathered])
@pytest.mark.parametrize("num_ranks", [8, 16, 72])
def test_many_ranks_give_what_one_gives(alone: MoE, num_ranks: int, make: Make) -> None:
    # Weights as EPLB would place them for the load of the last minute.
    load = torch.linspace(1, 4, NUM_EXPERTS).tolist()
    slots = balance_experts(load, num_slots=NUM_SLOTS, num_ranks=num_ranks)

    def body(rank: int, meetings: Meetings) -> Tensor:
        groups = thread_groups(rank, meetings)
        layer = rank_layer(alone, groups, slots, make(groups, meetings))
        return torch.cat([run_layer(layer, draw(rank + 100 * step)) for step in range(2)])

    results = run_ranks(num_ranks, body)
    for rank, actual in enumerate(results):
        rows = torch.cat([draw(rank + 100 * step) for step in range(2)])
        expected = run_layer(alone, rows)
        assert actual.shape == rows.shape
        if len(rows):
            # The same products; sums of bfloat16 parts in another order.
            assert relative_error(actual, expected) < 0.01, rank
