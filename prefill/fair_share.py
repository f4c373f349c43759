"""How the tokens of one step are shared among the prompts that wait for some. Pure.

First come, first served alone lets one prompt of 128k tokens take every step until it is through,
and all that came after it wait for seconds. Shortest first alone starves the long one. So half of a
step goes by age: the oldest prompt gets at least half of every step until it is computed, which
bounds everybody's wait. The other half, and what the first left over, goes to those that lack the
fewest tokens; among equals the older comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def share_tokens(wanted: Sequence[int], budget: int, max_shares: int) -> list[int]:
    """Return how many tokens each prompt gets, of what each lacks.

    Args:
        wanted: tokens that each prompt lacks, the oldest prompt first.
        budget: of the step; all of it is given out where so much is wanted and `max_shares` allow.
        max_shares: most prompts that get any.
    """
    shares = [0] * len(wanted)
    by_age = range(len(wanted))
    _give(by_age, wanted, shares, budget=budget - budget // 2, max_shares=max_shares)
    by_rest = sorted(by_age, key=lambda index: wanted[index] - shares[index])  # stable: by age
    _give(by_rest, wanted, shares, budget=budget - sum(shares), max_shares=max_shares)
    return shares


def _give(
    order: Iterable[int], wanted: Sequence[int], shares: list[int], *, budget: int, max_shares: int
) -> None:
    num_shares = sum(share > 0 for share in shares)
    for index in order:
        if budget == 0:
            return
        if shares[index] == 0 and num_shares == max_shares:
            continue
        given = min(wanted[index] - shares[index], budget)
        num_shares += shares[index] == 0 and given > 0
        shares[index] += given
        budget -= given
