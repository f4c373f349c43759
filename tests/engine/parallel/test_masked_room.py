"""Room for rows at experts, by dispatchers that need no library to say how much there is."""

import pytest

from engine.kernels.masked_rows import MaskedRoom
from engine.kernels.portable import portable_kernels
from engine.parallel.groups import RankGroup
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.token_dispatcher import MaskingDispatcher

KERNELS = portable_kernels(has_fp8=True)
DISPATCHERS: dict[str, MaskingDispatcher] = {
    "gathered": MaskedGatheredDispatcher(
        KERNELS, 32, RankGroup(rank=3, size=8), max_tokens_per_rank=128
    ),
}


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize(("num_tokens", "expected"), [(128, 32), (64, 16), (10, 3), (0, 1)])
def test_an_expert_of_deepseek_v3_expects_its_share_of_what_ranks_bring(
    name: str, num_tokens: int, expected: int
) -> None:
    room = DISPATCHERS[name].masked_room(num_tokens, 8)
    assert room.expected_rows == expected
    least = 8 * num_tokens
    assert least <= room.max_rows <= 1024


def test_padding_takes_room_and_is_not_expected() -> None:
    assert DISPATCHERS["gathered"].masked_room(1, 8) == MaskedRoom(1024, 1)
