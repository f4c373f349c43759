"""What a key's tiers come to among those that are configured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.keys.record import KeyRecord
from router.keys.tiers import (
    allowed_tiers,
    check_tiers_of,
    told_of_unknown,
    unknown_tiers,
    unreachable_tiers,
    usual_tier,
)
from runtime.config import TierSection
from runtime.errors import ConfigError
from runtime.tiers import Tiers

TIERS = Tiers((TierSection(name="max"), TierSection(name="base", order=1)))


def key(tiers: tuple[str, ...] = (), tier: str = "") -> KeyRecord:
    return KeyRecord(name="bob", sha256="0" * 64, tiers=tiers, tier=tier)


ORDERED = ("max", "pro", "base", "batch")
TIER_NAMES = st.sampled_from(ORDERED)


@given(
    default=TIER_NAMES,
    opened=st.sets(TIER_NAMES),
    named=st.lists(st.sampled_from((*ORDERED, "gold")), unique=True),
    has_key=st.booleans(),
)
def test_who_is_not_told_of_never_gets_a_tier_before_the_default(
    default: str, opened: set[str], named: list[str], has_key: bool
) -> None:
    sections = (
        TierSection(name=name, order=order, default=name == default, open=name in opened)
        for order, name in enumerate(ORDERED)
    )
    tiers = Tiers(tuple(sections))
    record = key(tuple(named)) if has_key else None
    allowed = allowed_tiers(tiers, record)
    if has_key and named:
        assert set(allowed) == set(named) - {"gold"}
    else:
        at = ORDERED.index(default)
        assert set(allowed) == opened | set(ORDERED[at:])
        assert usual_tier(tiers, record) == default
    assert usual_tier(tiers, record) in (allowed or ("",))


def test_a_tier_that_no_request_may_have_is_found() -> None:
    assert unreachable_tiers(TIERS, []) == ("max",)
    assert unreachable_tiers(TIERS, [key(), key(("base",))]) == ("max",)
    assert unreachable_tiers(TIERS, [key(), key(("max",))]) == ()
    assert unreachable_tiers(TIERS, [key(tier="max")]) == ()
    assert unreachable_tiers(TIERS, [key(("max",))]) == ("base",)
    assert unreachable_tiers(Tiers(), [key()]) == ()


@pytest.mark.parametrize(
    ("record", "unknown"),
    [
        (key(), ()),
        (key(("max", "base"), "max"), ()),
        (key(("gold", "base"), "gold"), ("gold",)),
        (key(("gold", "max", "ruby")), ("gold", "ruby")),
        (key(tier="gold"), ("gold",)),
    ],
)
def test_a_tier_that_is_not_configured_is_found(
    record: KeyRecord, unknown: tuple[str, ...]
) -> None:
    assert unknown_tiers(TIERS, record) == unknown
    assert set(allowed_tiers(TIERS, record)).isdisjoint(unknown)


@pytest.mark.parametrize(
    ("tiers", "record", "held"),
    [
        (TIERS, key(("gold",)), "requests of it are answered 403"),
        (TIERS, key(("gold", "base"), "gold"), "requests that name none are of 'base'"),
        (TIERS, key(("gold", "max")), "requests that name none are of 'max'"),
        (Tiers(), key(("gold",)), "no tiers are configured, so its tiers say nothing"),
    ],
)
def test_what_holds_for_such_a_key_is_said(tiers: Tiers, record: KeyRecord, held: str) -> None:
    assert held in told_of_unknown(tiers, record)


@pytest.mark.parametrize(
    ("record", "path"),
    [(key(("base", "gold")), "keys.bob.tiers"), (key(tier="gold"), "keys.bob.tier")],
)
def test_a_check_refuses_it_by_key_value_and_fix(record: KeyRecord, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_tiers_of([key(), record], TIERS)
    assert (caught.value.path, caught.value.value) == (path, "gold")
    assert "one of max, base" in caught.value.fix
    with pytest.raises(ConfigError, match=r"take it out of the key.*\[\[tiers\]\]"):
        check_tiers_of([record], Tiers())
    check_tiers_of([key(("base",))], TIERS)
