"""The schedule made on the device against the plain one: equal tables, whatever the lengths.

Also in Triton's interpreter (see `test_fused_gpu`).
"""

import importlib
import random

import pytest
import torch

from engine.attention.schedule_reference import OVERHEAD, best_schedule, count_pages, tabulate
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

ROUNDS = 2 if IS_INTERPRETED else 60


def draw_lengths() -> list[int]:
    """Return lengths of a step: any, about equal, with long ones, or with idle rows."""
    most = 40 if IS_INTERPRETED else 256
    num_seqs = min(most, random.choice([1, 2, 3, 16, 17, 32, 64, 65, 100, 128, 256]))
    kind = random.randrange(4)
    if kind == 0:
        return [random.randint(1, 8000) for _ in range(num_seqs)]
    if kind == 1:
        base = random.randint(1, 5000)
        return [base + random.randint(0, 300) for _ in range(num_seqs)]
    if kind == 2:
        return [random.choice([1, 70, 40000]) for _ in range(num_seqs)]
    live = random.randint(0, num_seqs)
    return [random.randint(1, 4000) if row < live else 1 for row in range(num_seqs)]


def assert_as_plain(lengths: list[int], num_parts: int, overhead: int = OVERHEAD) -> None:
    module = importlib.import_module("engine.kernels.fused.schedule")
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    tiles, sums = module.schedule(seq_lens, num_parts, overhead=overhead)
    plain = best_schedule(count_pages(lengths), num_parts, overhead)
    rows, expected_sums = tabulate(plain, num_parts)
    assert tiles.tolist() == rows, (lengths, num_parts)
    assert sums.tolist() == expected_sums, (lengths, num_parts)


@pytest.mark.parametrize("num_parts", [1, 16, 66, 132])
def test_any_lengths(num_parts: int) -> None:
    for _ in range(ROUNDS):
        assert_as_plain(draw_lengths(), num_parts)


@pytest.mark.parametrize("overhead", [1, 3, 8])
def test_other_overheads(overhead: int) -> None:
    assert_as_plain(draw_lengths(), 66, overhead)


@pytest.mark.parametrize(
    "lengths",
    [[1], [64] * 66, [2000] * 32, [4000] * 16, [130000]]
    + ([] if IS_INTERPRETED else [[2048] * 64, [2000] * 128, [1] * 256]),
)
def test_known_steps(lengths: list[int]) -> None:
    assert_as_plain(lengths, 66)
