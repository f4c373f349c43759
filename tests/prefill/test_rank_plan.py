"""The fixed-shape messages between ranks carry exactly what was put in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill.rank_plan import (
    CLOSURES_PER_ROW,
    ROW_BYTES,
    BatchArrays,
    Closure,
    ClosureOutcome,
    PlanKind,
    PlanShape,
    RankAnswer,
    StepPlan,
    decode_plan,
    decode_row,
    encode_plan,
    encode_row,
)
from runtime.errors import ErrorCode, InternalError

SHAPE = PlanShape(max_num_tokens=24, max_num_seqs=4, max_num_blocks=5, num_command_bytes=40)
U64 = st.integers(0, 2**64 - 1)


@st.composite
def batches(draw: st.DrawFn) -> BatchArrays:
    query_lens = draw(st.lists(st.integers(1, 6), min_size=1, max_size=SHAPE.max_num_seqs))
    num_tokens, num_blocks = sum(query_lens), draw(st.integers(1, SHAPE.max_num_blocks))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    num_logits = draw(st.integers(0, num_tokens))
    return BatchArrays(
        input_ids=random.integers(0, 2**31 - 1, num_tokens, dtype=np.int32),
        query_lens=np.array(query_lens, dtype=np.int32),
        seq_lens=random.integers(1, 300, len(query_lens), dtype=np.int32),
        block_tables=random.integers(0, 2**31 - 1, (len(query_lens), num_blocks), dtype=np.int32),
        logits_indices=np.arange(num_logits, dtype=np.int32),
    )


@given(U64, U64, batches(), st.binary(max_size=SHAPE.num_command_bytes))
def test_a_step_round_trips_in_a_message_of_fixed_size(
    epoch: int, step: int, batch: BatchArrays, commands: bytes
) -> None:
    plan = StepPlan(epoch=epoch, step=step, kind=PlanKind.STEP, batch=batch, commands=commands)
    message = encode_plan(plan, SHAPE)
    assert message.shape == (SHAPE.nbytes,)
    got = decode_plan(message, SHAPE)
    assert (got.epoch, got.step, got.kind, got.commands) == (epoch, step, PlanKind.STEP, commands)
    assert got.batch is not None
    for name in BatchArrays.__slots__:
        np.testing.assert_array_equal(getattr(got.batch, name), getattr(batch, name))


@pytest.mark.parametrize("kind", [PlanKind.COMMANDS, PlanKind.STOP])
def test_a_plan_without_batch_has_the_same_size(kind: PlanKind) -> None:
    plan = StepPlan(epoch=3, step=9, kind=kind, commands=b"abc")
    message = encode_plan(plan, SHAPE)
    assert message.shape == (SHAPE.nbytes,)
    assert decode_plan(message, SHAPE) == plan


def test_a_batch_beyond_the_shape_is_a_bug() -> None:
    zeros = np.zeros(SHAPE.max_num_tokens + 1, dtype=np.int32)
    one = np.ones(1, dtype=np.int32)
    batch = BatchArrays(
        input_ids=zeros,
        query_lens=one,
        seq_lens=one,
        block_tables=np.ones((1, 1), dtype=np.int32),
        logits_indices=one,
    )
    with pytest.raises(AssertionError, match="exceeds"):
        encode_plan(StepPlan(epoch=1, step=1, kind=PlanKind.STEP, batch=batch), SHAPE)


closures = st.builds(
    Closure,
    nonce=U64,
    outcome=st.sampled_from(ClosureOutcome),
    drained=st.booleans(),
    num_bytes=U64,
    transfer_s=st.floats(0, 1e6),
    finished_at=st.floats(0, 1e9),
    error_code=st.none() | st.sampled_from(ErrorCode),
    error=st.text(st.characters(codec="ascii"), max_size=96),
)


@given(U64, U64, st.lists(closures, max_size=CLOSURES_PER_ROW))
def test_a_row_round_trips_in_a_message_of_fixed_size(
    epoch: int, step: int, items: list[Closure]
) -> None:
    for refuses in (False, True):
        answer = RankAnswer(closures=items, refuses=refuses)
        row = encode_row(epoch, step, answer)
        assert row.shape == (ROW_BYTES,)
        assert decode_row(row, epoch, step) == answer


def test_a_long_error_is_cut() -> None:
    closure = Closure(nonce=1, outcome=ClosureOutcome.FAILED, error="\u00e9" * 90)
    (got,) = decode_row(encode_row(1, 2, RankAnswer(closures=[closure])), 1, 2).closures
    assert got.error.startswith("\u00e9" * 48)
    assert len(got.error.encode()) <= 99


@pytest.mark.parametrize(("epoch", "step"), [(1, 3), (2, 2)])
def test_a_row_of_another_step_or_life_is_an_error(epoch: int, step: int) -> None:
    with pytest.raises(InternalError, match="answers step 2"):
        decode_row(encode_row(1, 2, RankAnswer()), epoch, step)
