"""What a token leaves in the pool: divided over ranks where heads are, whole where they share."""

from hypothesis import given
from hypothesis import strategies as st

from engine.attention.kv_spec import KVSpec

SIZES = st.integers(1, 64)


@given(width=SIZES, tp=SIZES, block_size=SIZES)
def test_what_all_heads_share_is_whole_on_every_rank(width: int, tp: int, block_size: int) -> None:
    spec = KVSpec.shared(width)
    assert spec.on_rank(tp) == spec
    assert spec.layer_shape(block_size) == (block_size, width)


@given(heads=SIZES, width=SIZES, tp=SIZES, block_size=SIZES)
def test_heads_of_their_own_are_divided(heads: int, width: int, tp: int, block_size: int) -> None:
    spec = KVSpec(num_heads=heads * tp, head_width=width, is_split=True)
    share = spec.on_rank(tp)
    assert share.layer_shape(block_size) == (heads, block_size, width)
    assert share.width * tp == spec.width
