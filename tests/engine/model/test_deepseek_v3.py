"""The whole model: hooks, empty and dummy batches, dtypes, placement, and tied embeddings."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.attention_rule import AttentionRule
from engine.batch import ForwardBatch, pack_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.config import DeepseekV3Config
from engine.experts.placements import ExpertPlacements
from engine.layers.moe import Experts
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.weights.dummy import fill_with_dummy_weights
from engine.weights.loader import load_weights
from tests.engine.tiny import random_tensors, tiny_config, write_checkpoint

TOKENS = np.array([3, 14, 15, 92, 65, 35, 89, 79, 32], dtype=np.int64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def make_batch(tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> ForwardBatch:
    length = np.array([len(tokens)])
    table = np.arange(1, 2 + len(tokens) // 64, dtype=np.int32)[None]
    rows = np.arange(len(tokens))
    return pack_forward_batch(tokens, length, length, table, logits_indices=rows, block_size=64)


def logits_of(model: DeepseekV3ForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model.compute_logits(model(make_batch(TOKENS), build_kv_pool(model, 4)))


def test_layers_report_when_their_latents_are_written(checkpoint: Path) -> None:
    model = build_model(checkpoint)
    pool = build_kv_pool(model, 4)
    seen: list[tuple[int, list[bool]]] = []

    def note(layer: int) -> None:
        seen.append((layer, [bool(pool.layer(i)[1, : len(TOKENS)].all()) for i in range(3)]))

    model(make_batch(TOKENS), pool, on_layer_done=note)
    assert seen == [
        (0, [True, False, False]),
        (1, [True, True, False]),
        (2, [True, True, True]),
    ]


def test_a_token_does_not_see_its_successors(checkpoint: Path) -> None:
    model = build_model(checkpoint)
    logits = logits_of(model)
    shorter = model.compute_logits(model(make_batch(TOKENS[:5]), build_kv_pool(model, 4)))
    torch.testing.assert_close(shorter, logits[:5], rtol=1e-4, atol=1e-4)


def test_dummy_batch_touches_block_zero_only(checkpoint: Path) -> None:
    model = build_model(checkpoint)
    pool = build_kv_pool(model, 4)
    hidden = model(ForwardBatch.dummy(), pool)
    assert hidden.shape == (1, 64)
    assert not pool.data[1:].any()


def test_no_tokens_at_all(checkpoint: Path) -> None:
    model = build_model(checkpoint)
    none = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(
        input_ids=none,
        positions=none,
        slot_mapping=none,
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
        seq_lens=none.int(),
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
        logits_indices=none,
        max_seqlen_q=0,
    )
    hidden = model(batch, build_kv_pool(model, 2))
    assert hidden.shape == (0, 64)
    assert model.compute_logits(hidden).shape == (0, 128)


def test_bfloat16_is_near_float32(checkpoint: Path) -> None:
    exact = logits_of(build_model(checkpoint))
    model = build_model(checkpoint, dtype=torch.bfloat16)
    assert model.get_parameter("model.layers.1.mlp.gate.weight").dtype == torch.float32
    rounded = logits_of(model)
    assert rounded.dtype == torch.float32
    error = (rounded - exact).abs().max() / exact.abs().max()
    assert 1e-5 < float(error) < 0.15


@pytest.mark.parametrize("cost", [0.0, float("inf")])
def test_both_forms_of_attention_agree(checkpoint: Path, cost: float) -> None:
    config = DeepseekV3Config.from_dir(checkpoint)
    rule = AttentionRule.of(config, absorbed_cost=cost)
    model = DeepseekV3ForCausalLM(config, attention_rule=rule)
    load_weights(model, checkpoint)
    expected = logits_of(build_model(checkpoint))
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


def test_redundant_experts_change_nothing(checkpoint: Path) -> None:
    config = DeepseekV3Config.from_dir(checkpoint)
    table = [[7, 6, 5, 4, 3, 2, 1, 0, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7, 7, 0]]
    layers = config.expert_layers()
    assert len(layers) == len(table)
    placements = ExpertPlacements(table, 8, first_layer=layers.start)
    model = DeepseekV3ForCausalLM(config, placements=placements)
    load_weights(model, checkpoint)
    expected = logits_of(build_model(checkpoint))
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


def test_drafts_have_a_placement_of_their_own(checkpoint: Path) -> None:
    config = DeepseekV3Config.from_dir(checkpoint)
    layers = config.expert_layers(with_mtp=True)
    assert layers.stop == config.num_hidden_layers + 1
    in_order = tuple(range(8))
    placements = ExpertPlacements(
        [*[in_order] * (len(layers) - 1), in_order[::-1]], 8, first_layer=layers.start
    )
    moved = build_model(checkpoint, with_mtp=True, placements=placements)
    plain = build_model(checkpoint, with_mtp=True)
    for name, turned in (("model.layers.2", False), ("model.layers.3", True)):
        experts, reference = (
            model.get_submodule(f"{name}.mlp.experts") for model in (moved, plain)
        )
        assert isinstance(experts, Experts)
        assert isinstance(reference, Experts)
        expected = reference.w13.flip(0) if turned else reference.w13
        assert torch.equal(experts.w13, expected), name


def test_tied_embeddings(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    assert "lm_head.weight" not in tensors
    model = build_model(write_checkpoint(tmp_path, config, tensors=tensors))
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])


def test_dummy_weights_give_sane_activations() -> None:
    model = DeepseekV3ForCausalLM(DeepseekV3Config.from_hf(tiny_config()))
    fill_with_dummy_weights(model)
    logits = logits_of(model)
    assert logits.isfinite().all()
    assert 0.2 < float(logits.std()) < 5.0
