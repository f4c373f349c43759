"""The tokens of a step: all given out, the oldest served, short prompts not behind long ones."""

from hypothesis import given
from hypothesis import strategies as st

from prefill.fair_share import share_tokens

WANTED = st.lists(st.integers(1, 300), max_size=8)
FEW_WANTED = st.lists(st.integers(1, 150), max_size=5)
"""Where every token may cost a step."""


@given(WANTED, st.integers(1, 64), st.integers(1, 8))
def test_a_step_is_full_and_no_fuller_and_the_oldest_has_half_of_it(
    wanted: list[int], budget: int, max_shares: int
) -> None:
    shares = share_tokens(wanted, budget, max_shares)
    assert all(0 <= share <= most for share, most in zip(shares, wanted, strict=True))
    num_shares = sum(share > 0 for share in shares)
    assert sum(shares) <= budget
    assert num_shares <= max_shares
    if wanted:
        assert shares[0] >= min(wanted[0], (budget + 1) // 2)
    if num_shares < max_shares:
        assert sum(shares) == min(budget, sum(wanted))


@given(WANTED, st.integers(1, 64), st.integers(1, 8))
def test_equals_are_served_in_order_of_arrival(
    wanted: list[int], budget: int, max_shares: int
) -> None:
    shares = share_tokens(wanted, budget, max_shares)
    for older, mine in enumerate(wanted):
        for younger in range(older + 1, len(wanted)):
            if wanted[younger] == mine:
                assert shares[older] >= shares[younger]


@given(FEW_WANTED, st.integers(1, 64), st.integers(1, 8))
def test_everybody_comes_to_an_end_no_later_than_the_work_of_those_before_him_at_half_speed(
    wanted: list[int], budget: int, max_shares: int
) -> None:
    left = dict(enumerate(wanted))
    newcomer = len(wanted)
    ended: dict[int, int] = {}
    for step in range(1, 2 * sum(wanted) + 2):
        left[newcomer] = 1  # somebody short comes in every step
        newcomer += 1
        order = sorted(left)
        for index, share in zip(
            order, share_tokens([left[index] for index in order], budget, max_shares), strict=True
        ):
            left[index] -= share
            if left[index] == 0:
                del left[index]
                ended[index] = step
    for index in range(len(wanted)):
        half = (budget + 1) // 2
        assert ended[index] <= sum(-(-count // half) for count in wanted[: index + 1])


def test_a_long_prompt_leaves_half_of_each_step_to_short_ones() -> None:
    assert share_tokens([131_072, 2000, 1000], 8192, 16) == [5192, 2000, 1000]
    assert share_tokens([131_072, 9000, 1000], 8192, 16) == [4096, 3096, 1000]
    assert share_tokens([131_072], 8192, 16) == [8192]


def test_prompts_of_one_length_are_computed_one_after_the_other() -> None:
    assert share_tokens([6000, 6000, 6000], 8000, 16) == [6000, 2000, 0]
