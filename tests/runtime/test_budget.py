"""Budgets: what is left, which of several ends first, and what its end is called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.budget import Budget, BudgetKind, earliest
from runtime.errors import ErrorCode

TIMES = st.floats(min_value=0.0, max_value=1e6)


@given(total_s=TIMES, begun=TIMES, waited=TIMES)
def test_left_is_never_negative_and_over_when_nothing_is_left(
    total_s: float, begun: float, waited: float
) -> None:
    budget = Budget.start(BudgetKind.REQUEST, total_s, begun)
    now = begun + waited
    assert budget.left(now) >= 0.0
    assert budget.is_over(now) == (budget.left(now) == 0.0)


@given(st.lists(TIMES, min_size=1))
def test_the_earliest_is_over_when_any_is(totals: list[float]) -> None:
    budgets = [Budget.start(BudgetKind.CALL, total, 0.0) for total in totals]
    assert earliest(budgets).until == min(budget.until for budget in budgets)


def test_progress_restarts_the_same_limit() -> None:
    budget = Budget.start(BudgetKind.TRANSFER, 3.0, 10.0, "kv_transfer.transfer_timeout_s")
    later = budget.restarted(12.5)
    assert (later.until, later.setting) == (15.5, "kv_transfer.transfer_timeout_s")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (BudgetKind.REQUEST, ErrorCode.DEADLINE_EXCEEDED),
        (BudgetKind.FIRST_TOKEN, ErrorCode.DEADLINE_EXCEEDED),
        (BudgetKind.NEXT_TOKEN, ErrorCode.DEADLINE_EXCEEDED),
        (BudgetKind.QUEUE, ErrorCode.OVERLOADED),
        (BudgetKind.TRANSFER, ErrorCode.TRANSFER_FAILED),
        (BudgetKind.CALL, ErrorCode.PEER_LOST),
    ],
)
def test_the_error_follows_from_the_kind(kind: BudgetKind, code: ErrorCode) -> None:
    error = Budget.start(kind, 2.5, 0.0, "router.x_s").error("waiting for blocks", "req-1")
    assert error.code is code
    assert error.request_id == "req-1"
    assert error.message == (
        f"2.5 s for {kind.value} (router.x_s) are over while waiting for blocks"
    )
