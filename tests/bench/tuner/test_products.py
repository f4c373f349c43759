"""The products of a model, held against the weights that the model really has."""

import pytest
import torch

from bench.shapes import DEEPSEEK_V3, TINY
from bench.tuner.products import RowCounts, model_products
from engine.formats.triton_gemm.tiles import RowLayout
from engine.kernels.portable import portable_kernels
from engine.layers.matrix import Matrix
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.errors import ConfigError

pytestmark = pytest.mark.nightly

ROWS = RowCounts(plain=(16, 4096), aligned=(128, 300), masked=(8,))


def test_they_are_those_of_the_layers() -> None:
    model = DeepseekV3ForCausalLM(
        TINY, dtype=torch.bfloat16, device="meta", kernels=portable_kernels(has_fp8=True)
    )
    held = {
        tuple(module.weight.shape)
        for module in model.modules()
        if isinstance(module, Matrix) and module.takes_quantized
    }
    products = model_products(TINY, tp=1, ep=1, rows=ROWS)
    named = {
        (s.num_columns, s.depth)
        if s.layout is RowLayout.PLAIN
        else (s.num_experts, s.num_columns, s.depth)
        for s in products
    }
    assert named == held


def test_those_of_one_of_eight_ranks_of_the_full_model() -> None:
    products = model_products(DEEPSEEK_V3, tp=8, ep=8, rows=ROWS)
    sizes = {(s.num_columns, s.depth) for s in products if s.layout is RowLayout.PLAIN}
    assert sizes == {
        (2112, 7168), (3072, 1536), (4096, 512), (7168, 2048),  # attention
        (4608, 7168), (7168, 2304),  # dense layers
        (4096, 7168), (512, 7168), (7168, 256),  # shared experts, whole and split
    }  # fmt: skip
    experts = {(s.num_experts, s.num_columns, s.depth) for s in products} - {
        (1, *size) for size in sizes
    }
    assert experts == {(32, 4096, 7168), (32, 7168, 2048)}
    assert len(set(products)) == len(products)


def test_rows_are_counted_per_expert_in_whole_blocks() -> None:
    products = model_products(DEEPSEEK_V3, tp=1, ep=8, rows=ROWS)
    aligned = {s.num_rows for s in products if s.layout is RowLayout.ALIGNED}
    assert aligned == {32 * 128, 32 * 384}
    assert {s.num_rows for s in products if s.layout is RowLayout.MASKED} == {8}
    assert {s.num_rows for s in products if s.layout is RowLayout.PLAIN} == {16, 4096}


@pytest.mark.parametrize(("tp", "ep", "field"), [(3, 1, "--tp"), (1, 7, "--ep"), (0, 1, "--tp")])
def test_sizes_that_cannot_be_divided_are_refused(tp: int, ep: int, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        model_products(DEEPSEEK_V3, tp=tp, ep=ep, rows=ROWS)
