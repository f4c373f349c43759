"""What a key's tiers come to among those that are configured."""

from __future__ import annotations

import pytest

from router.keys.record import KeyRecord
from router.keys.tiers import allowed_tiers, check_tiers_of, told_of_unknown, unknown_tiers
from runtime.config import TierSection
from runtime.errors import ConfigError
from runtime.tiers import Tiers

TIERS = Tiers((TierSection(name="max"), TierSection(name="base", order=1)))


def key(tiers: tuple[str, ...] = (), tier: str = "") -> KeyRecord:
    return KeyRecord(name="bob", sha256="0" * 64, tiers=tiers, tier=tier)


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
