"""The language of faults: what it says, what it refuses, and that a run can be repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.faults import Fault, FaultKind, FaultPlan, FaultRule, parse_faults


def test_an_empty_text_breaks_nothing() -> None:
    plan = parse_faults("  ")
    assert plan == FaultPlan()
    assert not plan.affects("prefill-0")


def test_rules_seed_and_place() -> None:
    plan = parse_faults("delay=0.2@0.05, fail=0.02,late=0.1,seed=7,on=prefill-1")
    assert plan == FaultPlan(
        rules=(
            FaultRule(Fault(FaultKind.DELAY, 0.05), 0.2),
            FaultRule(Fault(FaultKind.FAIL), 0.02),
            FaultRule(Fault(FaultKind.LATE, 0.5), 0.1),
        ),
        seed=7,
        on="prefill-1",
    )
    assert plan.affects("prefill-1")
    assert not plan.affects("prefill-0")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("explode=0.1", "no fault 'explode'"),
        ("fail", "'fail' has no number"),
        ("fail=2", r"in \[0, 1\]"),
        ("fail=-0.1", r"in \[0, 1\]"),
        ("fail=nan", r"in \[0, 1\]"),
        ("fail=0.1@3", "takes no time"),
        ("delay=0.1@soon", "has no number"),
        ("delay=0.6,fail=0.6", "exceed 1"),
        ("seed=3", "no rule"),
        ("fail=0.1,seed=x", "'seed=x' has no number"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_field(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        parse_faults(text)
    assert "kv_transfer.faults" in str(caught.value)


@given(
    shares=st.lists(st.integers(0, 30), max_size=3),
    seed=st.integers(0, 2**32),
    worker=st.text(max_size=8),
    index=st.integers(0, 10**6),
)
def test_a_fate_is_repeatable_and_one_of_the_rules(
    shares: list[int], seed: int, worker: str, index: int
) -> None:
    kinds = list(FaultKind)
    text = ",".join(f"{kinds[i].value}={share / 100}" for i, share in enumerate(shares))
    plan = parse_faults(f"{text},seed={seed}" if text else "")
    fate = plan.fate(worker, index)
    assert fate == plan.fate(worker, index)
    assert fate is None or fate in [rule.fault for rule in plan.rules if rule.share > 0]


def test_shares_are_kept_and_workers_differ() -> None:
    plan = parse_faults("fail=0.25,delay=0.5,seed=3")
    fates = [plan.fate("prefill-0/0", index) for index in range(4000)]
    kinds = [fate.kind if fate else None for fate in fates]
    assert 900 < kinds.count(FaultKind.FAIL) < 1100
    assert 1900 < kinds.count(FaultKind.DELAY) < 2100
    assert fates != [plan.fate("prefill-1/0", index) for index in range(4000)]
