"""Sizes of an exchange: parts that do not overlap, and refusals that say what fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.nvlink.shape import LINE, NvlinkShape
from runtime.errors import ConfigError

V3 = {
    "num_ranks": 8,
    "num_experts": 256,
    "max_tokens_per_rank": 128,
    "hidden_size": 7168,
    "top_k": 8,
}


def test_deepseek_v3_on_eight_ranks() -> None:
    shape = NvlinkShape(**V3)
    assert (shape.num_local_experts, shape.rows_per_expert, shape.row_bytes) == (32, 1024, 7392)
    assert round(shape.buffer_bytes / 2**20, 1) == 28.0
    assert [shape.expected_rows(n) for n in (128, 64, 32, 1, 0)] == [32, 16, 8, 1, 1]


@given(
    ranks=st.integers(2, 8),
    local=st.integers(1, 128),
    tokens=st.integers(1, 512),
    groups=st.integers(1, 64),
    top_k=st.integers(1, 16),
)
def test_parts_follow_one_another(
    ranks: int, local: int, tokens: int, groups: int, top_k: int
) -> None:
    shape = NvlinkShape(
        num_ranks=ranks,
        num_experts=ranks * local,
        max_tokens_per_rank=tokens,
        hidden_size=128 * groups,
        top_k=top_k,
    )
    slots = ranks * tokens
    assert shape.routes >= ranks * (local + 1) * 4
    assert shape.rows >= shape.routes + slots * top_k * 8
    assert shape.half_bytes >= shape.rows + slots * shape.row_bytes
    assert shape.half_bytes >= slots * shape.hidden_size * 2
    assert shape.buffer_bytes == shape.halves + 2 * shape.half_bytes
    for offset in (shape.halves, shape.routes, shape.rows, shape.half_bytes):
        assert offset % LINE == 0
    assert shape.row_bytes % 16 == 0
    assert shape.half_bytes < 2**31
    assert shape.rows_per_expert >= slots


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_ranks": 1}, "ep"),
        ({"num_ranks": 16}, "ep"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank"),
        ({"max_tokens_per_rank": 513}, "max_tokens_per_rank"),
        ({"top_k": 17}, "num_experts_per_tok"),
        ({"num_experts": 260}, "num_physical_experts"),
        ({"num_experts": 2048}, "num_physical_experts"),
        ({"hidden_size": 7000}, "hidden_size"),
    ],
)
def test_refusals(changes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NvlinkShape(**(V3 | changes))
    assert caught.value.path == field
    assert caught.value.fix
