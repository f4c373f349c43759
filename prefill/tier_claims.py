"""Whose ticket is asked for next where there are tiers of service. Pure."""

from __future__ import annotations

import math
from collections import Counter

from prefill.request import PrefillRequest


def place_of(item: PrefillRequest) -> tuple[float, ...]:
    """The key by which queues are in order."""
    return item.place


def has_place(item: PrefillRequest, taken: Counter[int], most: int) -> bool:
    """Whether one more of its tier may be claimed.

    Tiers behind do not count against it; those before do, but for the share of its own.

    Args:
        item: who would be.
        taken: how many there are, by the order of their tier.
        most: how many of one tier and those before it there may be.
    """
    standing = item.standing
    own = math.ceil(standing.share * most)
    num_before = sum(count for order, count in taken.items() if order <= standing.order)
    return num_before < most or taken[standing.order] < own
