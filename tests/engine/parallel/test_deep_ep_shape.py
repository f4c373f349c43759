"""Sizes of DeepEP's buffers, and refusals that name what fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel import deep_ep
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from runtime.errors import ConfigError

V3 = {"num_ranks": 8, "num_experts": 256, "max_tokens_per_rank": 128, "hidden_size": 7168}


def test_deepseek_v3_on_eight_ranks() -> None:
    shape = LowLatencyShape(**V3)
    shape.check_library(top_k=8)
    assert (shape.num_local_experts, shape.rows_per_expert) == (32, 1024)
    assert round(shape.buffer_bytes / 2**20, 1) == 1820.0
    assert shape.queue_depth == 1024
    assert [shape.expected_rows(n, 8) for n in (128, 64, 32, 1, 0)] == [32, 16, 8, 1, 1]
    normal = NormalShape(num_ranks=8, num_experts=256, hidden_size=7168)
    normal.check_library()
    assert round(normal.buffer_bytes / 2**20, 1) == 320.2


@given(ranks=st.sampled_from([2, 4, 8, 16, 72]), local=st.integers(1, 8), tiles=st.integers(1, 4))
def test_buffers_grow_with_tokens_and_experts_not_with_ranks(
    ranks: int, local: int, tiles: int
) -> None:
    def size(num_experts: int, tokens: int, num_ranks: int = ranks) -> int:
        return LowLatencyShape(
            num_ranks=num_ranks,
            num_experts=num_experts,
            max_tokens_per_rank=tokens,
            hidden_size=2048,
        ).buffer_bytes

    experts, tokens = ranks * local * 8, 128 * tiles
    assert size(experts, tokens) % 128 == 0
    assert size(2 * experts, tokens) > 1.99 * size(experts, tokens)
    assert size(experts, 2 * tokens) > 1.99 * size(experts, tokens)
    assert size(experts, tokens, 1) == size(experts, tokens)


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank", "1024 or less"),
        ({"max_tokens_per_rank": 1025}, "max_tokens_per_rank", "1024 or less"),
        ({"max_tokens_per_rank": 100}, "max_tokens_per_rank", "112"),
        ({"num_ranks": 72, "num_experts": 256}, "num_physical_experts", "288"),
        ({"hidden_size": 7000}, "hidden_size", "another model"),
    ],
)
def test_sizes_that_do_not_fit_together(changes: dict[str, int], field: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LowLatencyShape(**(V3 | changes))
    assert caught.value.path == field
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "top_k", "field"),
    [
        ({"hidden_size": 2176}, 8, "hidden_size"),
        ({}, 12, "num_experts_per_tok"),
        ({"num_ranks": 12, "num_experts": 288}, 8, "ep"),
    ],
)
def test_what_low_latency_kernels_do_not_take(
    changes: dict[str, int], top_k: int, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LowLatencyShape(**(V3 | {"max_tokens_per_rank": 256} | changes)).check_library(top_k)
    assert caught.value.path == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_sms": 21}, "num_sms"),
        ({"num_experts": 255}, "num_physical_experts"),
        ({"hidden_size": 100}, "hidden_size"),
        ({"num_ranks": 1}, "ep"),
        ({"num_ranks": 16}, "ep"),
    ],
)
def test_what_normal_kernels_do_not_take(changes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NormalShape(
            **({"num_ranks": 8, "num_experts": 256, "hidden_size": 7168} | changes)
        ).check_library()
    assert caught.value.path == field


@pytest.mark.parametrize("ranks", [2, 16])
def test_environment(ranks: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(deep_ep, "RDMA_DEVICES", tmp_path)
    shape = LowLatencyShape(
        num_ranks=ranks, num_experts=256, max_tokens_per_rank=1024, hidden_size=7168
    )
    environment = {"NVSHMEM_DISABLE_NVLS": "0"}
    deep_ep.prepare_environment(environment, shape)
    assert environment["NVSHMEM_QP_DEPTH"] == "4096"
    assert environment["NVSHMEM_DISABLE_NVLS"] == "0", "what is set is kept"
    assert environment.get("NVSHMEM_REMOTE_TRANSPORT") == ("none" if ranks == 2 else None)
    (tmp_path / "mlx5_0").touch()
    environment = {}
    deep_ep.prepare_environment(environment, shape)
    assert "NVSHMEM_REMOTE_TRANSPORT" not in environment
    with pytest.raises(ConfigError, match="too shallow"):
        deep_ep.prepare_environment({"NVSHMEM_QP_DEPTH": "1024"}, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 8, 16, 72])
@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_sizes_are_the_librarys(ranks: int, tokens: int) -> None:
    library = pytest.importorskip("deep_ep")
    shape = LowLatencyShape(
        num_ranks=ranks, num_experts=288, max_tokens_per_rank=tokens, hidden_size=7168
    )
    hint = library.Buffer.get_low_latency_rdma_size_hint(tokens, 7168, ranks, 288)
    assert shape.buffer_bytes == hint
    if ranks <= 8:
        normal = NormalShape(num_ranks=ranks, num_experts=288, hidden_size=7168)
        library.Buffer.set_num_sms(normal.num_sms)
        for config in (
            library.Buffer.get_dispatch_config(ranks),
            library.Buffer.get_combine_config(ranks),
        ):
            assert config.get_nvl_buffer_size_hint(2 * 7168, ranks) == normal.buffer_bytes
