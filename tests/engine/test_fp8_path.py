"""A model whose weights stay in FP8, run by the portable kernels: the path of GPUs, without one.

Weights are the same numbers as in the dequantised model; only activations are rounded to e4m3, so
logits differ by a tenth of their scale. A mistake in a layout, a scale or a permutation would
differ by everything.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import ForwardBatch, pack_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.config import DeepseekV3Config
from engine.kernels.portable import portable_kernels
from engine.layers.mla import MLA
from engine.layers.moe import MoE
from engine.layers.norm import FeedFormat
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.weights.fp8 import dequantize_block
from engine.weights.loader import load_weights
from tests.engine.tiny import tiny_config, write_checkpoint

CONFIG = tiny_config(
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=128,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    # Every token uses every expert: a rounding that changes the choice would change everything.
    topk_group=2,
    num_experts_per_tok=8,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)
MAX_ERROR = 0.16
"""Relative to the logits' norm; measured 0.10 to 0.12 with random weights."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("fp8"), CONFIG, fp8=True)


def load(checkpoint: Path, *, fp8: bool, max_positions: int = 0) -> DeepseekV3ForCausalLM:
    kernels = portable_kernels(has_fp8=fp8)
    kernels.attention.max_positions = max_positions
    config = DeepseekV3Config.from_dir(checkpoint)
    model = DeepseekV3ForCausalLM(config, dtype=torch.bfloat16, kernels=kernels)
    load_weights(model, checkpoint)
    return model.eval()


def make_batch(model: DeepseekV3ForCausalLM, lengths: list[int]) -> tuple[ForwardBatch, KVPool]:
    blocks = [-(-length // 8) for length in lengths]
    tables = np.zeros((len(lengths), max(blocks)), dtype=np.int32)
    first = 1
    for row, count in enumerate(blocks):
        tables[row, :count] = np.arange(first, first + count)
        first += count
    ids = np.random.default_rng(1).integers(0, 128, sum(lengths))
    lens = np.array(lengths, dtype=np.int64)
    batch = pack_forward_batch(
        ids, lens, lens, tables, logits_indices=np.cumsum(lens) - 1, block_size=8
    )
    return batch, build_kv_pool(model, first, block_size=8)


@torch.inference_mode()
def run(model: DeepseekV3ForCausalLM, lengths: list[int]) -> Tensor:
    batch, pool = make_batch(model, lengths)
    pool.data.fill_(float("nan"))
    pool.data[0] = 0.0
    return model.compute_logits(model(batch, pool))


def test_weights_keep_the_bytes_of_the_checkpoint(checkpoint: Path) -> None:
    stored, plain = load(checkpoint, fp8=True), load(checkpoint, fp8=False)
    layer, expected = stored.model.layers[1], plain.model.layers[1]
    assert isinstance(layer.self_attn, MLA)
    assert isinstance(expected.self_attn, MLA)
    assert layer.self_attn.feed_format is FeedFormat.FP8
    assert expected.self_attn.feed_format is FeedFormat.PLAIN
    for name in ("qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"):
        matrix = getattr(layer.self_attn, name).matrix
        assert matrix.weight.dtype == torch.float8_e4m3fn
        dequantized = matrix.dequantized()
        assert torch.equal(dequantized, getattr(expected.self_attn, name).weight), name
    assert isinstance(layer.mlp, MoE)
    assert isinstance(expected.mlp, MoE)
    for index in range(layer.mlp.experts.num_local_experts):
        weight, scale = layer.mlp.experts.up.stored.pair()
        assert torch.equal(
            dequantize_block(weight[index], scale[index]).bfloat16(),
            expected.mlp.experts.w13[index],
        )


@pytest.mark.parametrize("lengths", [[1], [37], [9, 1, 20, 33]])
@pytest.mark.parametrize("max_positions", [0, 40, 4096])
def test_logits_differ_by_the_rounding_of_activations(
    checkpoint: Path, lengths: list[int], max_positions: int
) -> None:
    expected = run(load(checkpoint, fp8=False), lengths)
    actual = run(load(checkpoint, fp8=True, max_positions=max_positions), lengths)
    assert (actual - expected).norm() < MAX_ERROR * expected.norm()


def test_dummy_weights_fill_scales(checkpoint: Path) -> None:
    config = DeepseekV3Config.from_dir(checkpoint)
    first, second = (
        build_model(config, load_format="dummy", kernels=portable_kernels(has_fp8=fp8))
        for fp8 in (True, False)
    )
    part = first.model.layers[0].self_attn
    other = second.model.layers[0].self_attn
    assert isinstance(part, MLA)
    assert isinstance(other, MLA)
    error = (part.o_proj.matrix.dequantized() - other.o_proj.weight).norm()
    assert error < 0.04 * other.o_proj.weight.norm()  # e4m3 has 3 bits of mantissa
