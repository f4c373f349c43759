"""Records of transfers become the waits of steps: which phase, whose wait, and what is nobody's."""

import numpy as np
import pytest
import torch

from engine.parallel.device_waits import Records, StepSplitter, StepWaits
from engine.parallel.nvlink.records import SLOTS, RingReader, make_ring, records_of
from runtime.stragglers.rank_waits import Phase

US = 1000
EPOCH = 1_700_000_000_000_000_000


def played(
    first: int, transfers: list[tuple[bool, int, list[int]]], *, at: int = EPOCH
) -> tuple[Records, int]:
    """Return records of transfers, and when the last ended.

    Args:
        first: number of the first.
        transfers: for each, whether it is a combine, microseconds of own work, and of waits by
            source, of which half is over at a source's first flag.
        at: when the wait before them ended.
    """
    begins, waits = [], []
    for _, own, waited in transfers:
        begins.append(at + own * US)
        waits.append(waited)
        at = begins[-1] + max(waited) * US
    begin = np.array(begins, dtype=np.int64)
    late = np.array(waits, dtype=np.int64) * US
    records = Records(
        numbers=np.arange(first, first + len(begin)),
        are_combines=np.array([is_combine for is_combine, *_ in transfers]),
        num_rows=np.array([0 if is_combine else 100 for is_combine, *_ in transfers]),
        begin_ns=begin,
        first_ns=begin[:, None] + late // 2,
        last_ns=begin[:, None] + late,
    )
    return records, at


def joined(*parts: Records) -> Records:
    return Records(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in Records.__dataclass_fields__
        }
    )


LAYER = [(False, 60, [0, 4, 10]), (True, 50, [0, 2, 0])]


def us(values: np.ndarray) -> list[float]:  # type: ignore[type-arg]
    result: list[float] = (1e6 * values).round(3).tolist()
    return result


def test_a_step_is_what_is_new_in_a_reading() -> None:
    splitter = StepSplitter()
    before, at = played(1, LAYER)
    splitter.take(before)
    step, _ = played(3, [(False, 500, [0, 30, 7]), LAYER[1], *LAYER], at=at)
    found = splitter.take(joined(before, step))
    assert found.num_transfers == 4
    assert us(found.own_s) == [500, 60, 100]
    assert us(found.waits_s[Phase.FIRST]) == [0, 30, 7]
    assert us(found.waits_s[Phase.DISPATCH]) == [0, 4, 10]
    assert us(found.waits_s[Phase.COMBINE]) == [0, 4, 0]
    assert us(found.first_s[Phase.DISPATCH]) == [0, 2, 5]
    assert found.num_rows == 200


def test_what_was_before_the_first_reading_is_no_work() -> None:
    found = StepSplitter().take(played(7, LAYER)[0])
    assert us(found.own_s) == [0, 0, 50]


def test_a_reading_without_anything_new_is_a_step_of_nothing() -> None:
    splitter = StepSplitter()
    records, _ = played(1, LAYER)
    splitter.take(records)
    found = splitter.take(records)
    assert (found.num_transfers, found.num_rows) == (0, 0)
    assert not found.own_s.any()
    assert not found.waits_s.any()


def test_of_a_step_longer_than_the_ring_the_rest_counts() -> None:
    """As much is lost on all ranks; the work before a transfer whose forerunner is lost, too."""
    splitter = StepSplitter()
    before, at = played(1, LAYER)
    splitter.take(before)
    step, _ = played(3, 3 * LAYER, at=at)
    rest = Records(**{name: getattr(step, name)[3:] for name in Records.__dataclass_fields__})
    found = splitter.take(rest)
    assert found.num_transfers == 3
    assert us(found.own_s) == [0, 60, 50]


def test_flags_seen_before_the_wait_began_are_no_wait() -> None:
    records, _ = played(1, LAYER)
    early = Records(
        **{
            **{name: getattr(records, name) for name in Records.__dataclass_fields__},
            "last_ns": records.last_ns - 20 * US,
        }
    )
    found: StepWaits = StepSplitter().take(early)
    assert not found.waits_s.any()
    assert not found.first_s.any()


def put(ring: torch.Tensor, number: int, kind: int, rows: int, times: list[int]) -> None:
    ring[number % SLOTS] = torch.tensor([2 * number + kind, rows, *times])


@pytest.mark.parametrize("first", [1, SLOTS - 1, 5 * SLOTS])
def test_a_ring_is_read_in_the_order_of_transfers(first: int) -> None:
    ring = make_ring(2, torch.device("cpu"))
    put(ring, first, 0, 12, [20, 30, 5, 5])
    put(ring, first + 1, 1, 99, [60, 61, 50, 50])
    found = records_of(ring, rank=1)
    assert found.numbers.tolist() == [first, first + 1]
    assert found.are_combines.tolist() == [False, True]
    assert found.num_rows.tolist() == [12, 99]
    assert found.begin_ns.tolist() == [5, 50]
    assert found.first_ns.tolist() == [[20, 5], [60, 50]]
    assert found.last_ns.tolist() == [[30, 5], [61, 50]]


def test_a_reading_is_of_the_moment_at_which_it_was_started() -> None:
    ring = make_ring(2, torch.device("cpu"))
    reader = RingReader(ring, 0)
    put(ring, 1, 0, 12, [5, 5, 20, 30])
    reading = reader.start_reading()
    put(ring, 2, 1, 0, [60, 60, 70, 75])
    assert reading.is_done
    step = reading.take()
    assert (step.num_transfers, step.num_rows) == (1, 12)
    assert step.waits_s[Phase.FIRST].tolist() == pytest.approx([0.0, 25e-9])
    step = reader.start_reading().take()
    assert step.waits_s[Phase.COMBINE].tolist() == pytest.approx([0.0, 15e-9])
    assert step.own_s[Phase.COMBINE] == pytest.approx(30e-9)
