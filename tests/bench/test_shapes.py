"""A shard keeps the size of a rank's products and the rows of an expert."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.shapes import (
    DEEPSEEK_V3,
    SHAPES,
    expert_shard,
    read_shape,
    tensor_shard,
    with_layers,
)
from runtime.errors import ConfigError

V3 = DEEPSEEK_V3


def test_shapes_have_names_or_folders(tmp_path: Path) -> None:
    assert read_shape("deepseek-v3") is V3
    bundled = Path(__file__).resolve().parents[2] / "deploy" / "models" / "tandem-python"
    assert read_shape(str(bundled)).num_hidden_layers > 0
    with pytest.raises(ConfigError, match=r"model-shape.*deepseek-v3"):
        read_shape("deepseek-v4")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(str(tmp_path))


def test_four_ranks_hold_what_four_of_eight_hold() -> None:
    shard = tensor_shard(V3, ranks=4, of=8)
    assert (shard.num_attention_heads, shard.n_routed_experts) == (64, 128)
    assert (shard.num_experts_per_tok, shard.n_group, shard.topk_group) == (4, 4, 2)
    assert (shard.intermediate_size, shard.hidden_size) == (9216, 7168)
    own = expert_shard(V3, ranks=4, of=8)
    assert (own.num_attention_heads, own.n_routed_experts) == (128, 128)
    assert (own.num_experts_per_tok, own.n_group, own.topk_group) == (8, 4, 4)


@given(
    name=st.sampled_from(sorted(SHAPES)), ranks=st.sampled_from((1, 2, 4, 8)), tokens=st.just(4096)
)
def test_rows_of_an_expert_are_kept(name: str, ranks: int, tokens: int) -> None:
    full = SHAPES[name]
    shard = tensor_shard(full, ranks=ranks, of=8)
    assert shard.num_attention_heads / ranks == full.num_attention_heads / 8
    assert shard.n_routed_experts / ranks == full.n_routed_experts / 8
    rows = tokens * full.num_experts_per_tok / full.n_routed_experts
    assert tokens * shard.num_experts_per_tok / shard.n_routed_experts == rows
    own = expert_shard(full, ranks=ranks, of=8)
    rows = 8 * tokens * full.num_experts_per_tok / full.n_routed_experts
    assert ranks * tokens * own.num_experts_per_tok / own.n_routed_experts == rows


@given(num_layers=st.integers(1, 61))
def test_fewer_layers_keep_the_proportion(num_layers: int) -> None:
    fewer = with_layers(V3, num_layers)
    assert fewer.num_hidden_layers == num_layers
    assert abs(fewer.first_k_dense_replace - 3 * num_layers / 61) <= 0.5
    assert with_layers(V3, 61) == V3


@pytest.mark.parametrize("num_layers", [0, 62])
def test_more_layers_than_there_are(num_layers: int) -> None:
    with pytest.raises(ConfigError, match=r"layers.*1 to 61"):
        with_layers(V3, num_layers)


def test_what_cannot_be_divided_is_named() -> None:
    with pytest.raises(ConfigError, match=r"shard-of = 3.*n_group = 8"):
        tensor_shard(V3, ranks=1, of=3)
    with pytest.raises(ConfigError, match="fewer than the 4 ranks"):
        expert_shard(V3, ranks=4, of=2)
