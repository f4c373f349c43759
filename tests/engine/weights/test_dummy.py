"""Invented weights do not depend on how they are shared out, and make a working model."""

import torch

from engine.config import DeepseekV3Config
from engine.experts.placements import ExpertPlacements
from engine.layers.moe import Experts
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.weights.dummy import fill_with_dummy_weights
from tests.engine.parallel.fake_ranks import rank_context
from tests.engine.tiny import tiny_config

CONFIG = DeepseekV3Config.from_hf(tiny_config())


def test_shards_are_parts_of_the_same_model() -> None:
    whole = DeepseekV3ForCausalLM(CONFIG)
    fill_with_dummy_weights(whole)
    by_name = {part.name: part.destination for part in whole.weight_slices()}
    for rank in range(2):
        shard = DeepseekV3ForCausalLM(CONFIG, rank_context(rank, tp=2, ep=2).groups)
        fill_with_dummy_weights(shard)
        for part in shard.weight_slices():
            if part.destination is not None:
                reference = by_name[part.name]
                assert reference is not None
                window = tuple(slice(start, end) for start, end in part.ranges)
                assert torch.equal(part.destination, reference[window]), part.name


def test_replicas_are_alike() -> None:
    layers = CONFIG.expert_layers()
    placements = ExpertPlacements.alike([0, 1, 2, 3, 4, 5, 6, 7, 2, 2], 8, layers=layers)
    model = DeepseekV3ForCausalLM(CONFIG, placements=placements)
    calls: list[tuple[int, int]] = []
    fill_with_dummy_weights(model, progress=lambda *call: calls.append(call))
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert isinstance(experts, Experts)
    assert torch.equal(experts.w13[2], experts.w13[8])
    assert torch.equal(experts.w2[2], experts.w2[9])
    assert not torch.equal(experts.w2[2], experts.w2[3])
    assert calls[-1][0] == calls[-1][1] == sum(p.nbytes for p in model.parameters())


def test_seeds_differ() -> None:
    first, second = DeepseekV3ForCausalLM(CONFIG), DeepseekV3ForCausalLM(CONFIG)
    fill_with_dummy_weights(first, seed=1)
    fill_with_dummy_weights(second, seed=2)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)
