"""What fits beside the rest: the terms add up, and what does not fit is refused with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.kv_budget import MemorySums, check_num_blocks
from engine.options import ChunkSteps, EngineOptions, TokenSteps
from runtime.errors import ConfigError

GIB = 2**30
SIZES = st.integers(0, 200 * GIB)


def sums(**changes: float) -> MemorySums:
    terms = {
        "total": 140 * GIB,
        "used": 100 * GIB,
        "graphs": 2 * GIB,
        "activations": 6 * GIB,
        "block_bytes": 5 * 2**20,
        "fraction": 0.9,
    }
    return MemorySums(**(terms | changes))  # type: ignore[arg-type]


def test_what_is_left_of_the_share_is_kv() -> None:
    assert sums().room == 126 * GIB - 108 * GIB
    assert sums().num_blocks == 18 * 1024 // 5


DRAWN = st.builds(
    MemorySums,
    total=SIZES,
    used=SIZES,
    graphs=SIZES,
    activations=SIZES,
    block_bytes=st.integers(1, GIB),
    fraction=st.floats(0.01, 1.0),
)


@given(DRAWN)
def test_blocks_never_exceed_the_share(drawn: MemorySums) -> None:
    taken = drawn.used + drawn.graphs + drawn.activations
    share = int(drawn.total * drawn.fraction)
    if drawn.num_blocks:
        assert taken + drawn.num_blocks * drawn.block_bytes <= share
    assert taken + (drawn.num_blocks + 1) * drawn.block_bytes > share


@pytest.mark.parametrize(
    ("role", "steps", "field"),
    [("prefill", ChunkSteps(), "batched_tokens"), ("decode", TokenSteps(), "seqs")],
)
def test_less_than_one_request_is_refused_with_the_sums(
    role: str, steps: ChunkSteps | TokenSteps, field: str
) -> None:
    options = EngineOptions(steps=steps, prefix=f"{role}.")
    assert check_num_blocks(options, 3, sums(), max_model_len=128) == 3
    with pytest.raises(ConfigError) as caught:
        check_num_blocks(options, 2, sums(used=138 * GIB), max_model_len=128)
    assert (caught.value.path, caught.value.value) == (f"{role}.num_blocks", 0)
    assert "used=138.00" in caught.value.problem
    assert "left=-20.00" in caught.value.problem
    assert f"{role}.max_num_{field}" in caught.value.fix
    assert f"{role}.gpu_memory_fraction" in caught.value.fix
