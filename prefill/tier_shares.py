"""How the tokens of one step are shared among tiers of service. Pure.

Every tier that waits has its share of the step's tokens, and a place among its requests; the rest
goes to the tiers in order, and within a tier `fair_share` decides. A long step of the tiers behind
would make a first token late all the same: so they get no more beyond their shares than lets every
request before them, by the measured time of steps, meet its target. A request whose target is out
of reach, or over, holds nobody back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from prefill.fair_share import share_tokens
from runtime.metrics.step_time import StepTime


class Want(NamedTuple):
    """One request that lacks tokens."""

    order: int
    """Of its tier."""
    share: float
    """Of its tier."""
    num_tokens: int
    deadline: float
    """When its first token is due; infinite without a target."""


class StepLimits(NamedTuple):
    """Of one step, or of several that are looked at as one."""

    num_tokens: int
    num_requests: int


def share_among_tiers(
    wants: Sequence[Want], limits: StepLimits, steps: StepTime, now: float
) -> list[int]:
    """Return how many tokens each request gets.

    Args:
        wants: by tier, the first in order first, and within a tier the oldest first.
        limits: most tokens, and most requests that get any.
        steps: seconds of a step by its tokens.
        now: on the clock of the deadlines.
    """
    groups = [list(group) for _, group in itertools.groupby(wants, key=lambda want: want.order)]
    wanted = [[want.num_tokens for want in group] for group in groups]
    if len(groups) == 1:
        return share_tokens(wanted[0], *limits)
    given = _guaranteed(groups, wanted, limits)
    least = [sum(shares) for shares in given]
    for index, tier in enumerate(wanted):
        left = limits.num_tokens - sum(map(sum, given)) + sum(given[index])
        places = limits.num_requests - sum(map(_count, given)) + _count(given[index])
        spared = _spared(groups[:index], given, steps, now)
        given[index] = share_tokens(tier, min(left, max(least[index], spared)), places)
    return [share for shares in given for share in shares]


def _guaranteed(
    groups: Sequence[Sequence[Want]], wanted: Sequence[Sequence[int]], limits: StepLimits
) -> list[list[int]]:
    """What every tier has by its share alone; a token and a place at least, while there are any."""
    given: list[list[int]] = []
    tokens, places = limits
    for group, tier in zip(groups, wanted, strict=True):
        share = group[0].share
        own_tokens = min(tokens, max(1, math.floor(share * limits.num_tokens))) if share else 0
        own_places = min(places, max(1, math.floor(share * limits.num_requests)))
        shares = share_tokens(tier, own_tokens, own_places)
        tokens -= sum(shares)
        places -= _count(shares)
        given.append(shares)
    return given


def _spared(
    ahead: Sequence[Sequence[Want]], given: Sequence[Sequence[int]], steps: StepTime, now: float
) -> int:
    """Tokens that the next tier may have without making anybody of those ahead late.

    ``given`` has what the tiers ahead get in this step, and those after them by their shares.
    """
    spared = 2**31 - 1
    num_tokens = 0
    for index, group in enumerate(ahead):
        num_tokens += sum(want.num_tokens for want in group)
        alone_s = steps.seconds(num_tokens)
        in_reach = [want.deadline for want in group if want.deadline >= now + alone_s]
        due = min(in_reach, default=math.inf)
        if math.isinf(due) or not steps.per_item_s:
            continue
        behind = sum(sum(shares) for shares in given[index + 1 : len(ahead)])
        spared = min(spared, int((due - now - alone_s) / steps.per_item_s) - behind)
    return max(0, spared)


def _count(shares: Sequence[int]) -> int:
    return sum(share > 0 for share in shares)
