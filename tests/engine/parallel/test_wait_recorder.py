"""What ranks record of their waits says who is slow, to the microsecond of what was arranged."""

from collections.abc import Callable

import numpy as np
import pytest

from engine.parallel.device_waits import StepWaits
from engine.parallel.wait_recorder import KEPT_BLOCKS, WaitRecorder
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, STEPS_OF_BLOCK, Phase, window_of
from runtime.stragglers.slow_ranks import SlowKind, find_slow
from tests.engine.parallel.virtual_time import (
    ATTENTION_S,
    EXPERTS_S,
    GAP_S,
    LINK_S,
    NUM_LAYERS,
    VirtualRank,
    record,
)


def places(blocks: dict, num_ranks: int) -> list[tuple[SlowKind, int, int]]:  # type: ignore[type-arg]
    window = window_of(blocks, num_ranks)
    assert window is not None
    return [(found.kind, found.rank, found.source) for found in find_slow(window)]


def nothing(rank: int, played: VirtualRank) -> None:
    pass


def test_every_rank_records_its_own_work_and_its_waits_on_its_own_clock() -> None:
    def arrange(rank: int, played: VirtualRank) -> None:
        if rank == 1:
            played.attention_s += 30e-6

    blocks = record(4, arrange)
    assert [len(of_rank) for of_rank in blocks.values()] == [BLOCKS_OF_WINDOW] * 4
    for rank, of_rank in blocks.items():
        assert [block.number for block in of_rank] == list(range(BLOCKS_OF_WINDOW))
        for block in of_rank:
            more = 30e-6 if rank == 1 else 0.0
            # The first layer's attention comes after the host's work.
            assert block.own_s[Phase.FIRST] == pytest.approx(GAP_S + ATTENTION_S + more)
            assert block.own_s[Phase.DISPATCH] == pytest.approx(ATTENTION_S + more)
            assert block.own_s[Phase.COMBINE] == pytest.approx(NUM_LAYERS * EXPERTS_S)
            assert block.own_mean_s == pytest.approx(block.own_s)
            assert (block.num_rows, block.num_tokens) == (NUM_LAYERS * 1000, 128)
            waits = block.waits_s[Phase.DISPATCH]
            assert waits[rank] == 0.0
            if rank != 1:
                others = [waits[source] for source in range(4) if source not in (1, rank)]
                assert others == pytest.approx([LINK_S, LINK_S])
                # It left the meeting before by a link earlier: nobody was later than it.
                assert waits[1] == pytest.approx(30e-6 + LINK_S, abs=LINK_S)


@pytest.mark.parametrize("num_ranks", [4, 72])
def test_a_sender_five_percent_slower_is_found_among_threads(num_ranks: int) -> None:
    def arrange(rank: int, played: VirtualRank) -> None:
        if rank == 2:
            played.attention_s *= 1.05

    assert places(record(num_ranks, arrange), num_ranks) == [(SlowKind.SENDER, 2, -1)]


def test_two_slow_of_four_are_both_found() -> None:
    def arrange(rank: int, played: VirtualRank) -> None:
        if rank in (0, 3):
            played.attention_s *= 1.05

    found = places(record(4, arrange), 4)
    assert sorted(rank for _, rank, _ in found) == [0, 3]
    assert {kind for kind, *_ in found} == {SlowKind.SENDER}


def test_a_rank_with_a_fifth_more_rows_is_found_as_a_hot_receiver() -> None:
    def arrange(rank: int, played: VirtualRank) -> None:
        if rank == 1:
            played.rows = 1.2

    assert places(record(4, arrange), 4) == [(SlowKind.RECEIVER, 1, -1)]


def test_a_slow_link_is_found_and_its_ends_are_not_blamed() -> None:
    found = places(record(4, nothing, links={(3, 1): 3 * LINK_S}), 4)
    assert found == [(SlowKind.LINK, 3, 1)]


@pytest.mark.parametrize("every", [1, 10])
def test_a_host_that_sleeps_between_steps_is_found(every: int) -> None:
    def each_step(rank: int, step: int, played: VirtualRank) -> None:
        if rank == 2:
            played.gap_s = GAP_S + (every * 0.5e-3 if step % every == 0 else 0.0)

    assert places(record(4, nothing, each_step=each_step), 4) == [(SlowKind.HOST, 2, -1)]


def test_equal_ranks_give_no_finding() -> None:
    assert places(record(8, nothing), 8) == []


class LoneFlags:
    """Of a rank whose peers are always there."""

    def send(self) -> None:
        pass

    def receive(self, arrived: Callable[[int], None]) -> None:
        arrived(1)

    def close(self) -> None:
        pass


class LateDevice:
    """A device whose records come to the host when a test says so."""

    def __init__(self, idle_s: float = 0.0) -> None:
        self.started = self.taken = self.done = self.begun = 0
        self.idle_s = idle_s

    def begin_step(self) -> None:
        self.begun += 1

    def start_reading(self) -> "LateReading":
        self.started += 1
        return LateReading(self, self.started)


class LateReading:
    """Of step `number`: it took so many milliseconds of own work, and half of that was waited."""

    def __init__(self, device: LateDevice, number: int) -> None:
        self._device, self._number = device, number

    @property
    def is_done(self) -> bool:
        return self._device.done >= self._number

    def take(self) -> StepWaits:
        self._device.taken += 1
        assert self._device.taken == self._number, "each once, in their order"
        own = np.array([1e-3, 2e-3, 3e-3]) * self._number
        waits = np.zeros((3, 2))
        waits[:, 1] = 0.5 * own
        return StepWaits(
            waits_s=waits,
            first_s=0.5 * waits,
            own_s=own + np.array([self._device.idle_s, 0.0, 0.0]),
            num_rows=7 * self._number,
            num_transfers=4,
            idle_s=self._device.idle_s,
        )


class StandingClock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("idle_s", [0.0, 3e-3, 9e-3])
def test_what_the_device_records_is_added_to_its_step_however_late_it_comes(
    idle_s: float,
) -> None:
    """The host's work counts as far as the device stood idle, which is no work of its own."""
    clock, device = StandingClock(), LateDevice(idle_s)
    waits = WaitRecorder(2, LoneFlags(), clock)
    waits.device = device
    for number in range(1, 2 * STEPS_OF_BLOCK + 2):
        waits.end_step()
        clock.now += 4e-3  # the host's own work
        with waits.waiting(Phase.FIRST):
            pass
        waits.begin_step(has_work=True, num_tokens=number)
        waits.launched()
        with waits.device_wait():
            clock.now += 20e-3  # is no work of the host's
        if number == STEPS_OF_BLOCK:
            assert waits.blocks == ()
            device.done = number + 1  # of the first block all, and of the step behind it
    assert len(waits.blocks) == 1
    (block,) = waits.blocks
    steps = np.arange(2, STEPS_OF_BLOCK + 2)  # the first follows none
    assert block.own_s == pytest.approx(
        [
            1e-3 * np.median(steps) + min(idle_s, 4e-3),
            2e-3 * np.median(steps),
            3e-3 * np.median(steps),
        ]
    )
    assert [row[1] for row in block.waits_s] == pytest.approx(
        [0.5e-3 * k * np.median(steps) for k in (1, 2, 3)]
    )
    assert np.array(block.first_waits_s) == pytest.approx(0.5 * np.array(block.waits_s))
    assert block.num_rows == 7 * steps.mean()
    assert block.num_tokens == steps.mean()
    device.done = 1000
    waits.end_step()
    assert [each.number for each in waits.blocks] == [0, 1]


def test_steps_that_do_not_count_are_read_all_the_same() -> None:
    device = LateDevice()
    waits = WaitRecorder(2, LoneFlags(), StandingClock())
    waits.device = device
    device.done = 1000
    for has_work in [True, True, False, True, True, False]:
        waits.end_step()
        waits.begin_step(has_work=has_work, num_tokens=1)
        if has_work:
            waits.launched()
    waits.end_step()
    assert device.begun == device.started == device.taken == 4


def test_without_records_of_the_device_its_steps_are_the_host_s_own_work() -> None:
    clock = StandingClock()
    waits = WaitRecorder(2, LoneFlags(), clock)
    for _ in range(STEPS_OF_BLOCK + 1):
        waits.end_step()
        with waits.waiting(Phase.FIRST):
            pass
        waits.begin_step(has_work=True, num_tokens=1)
        waits.launched()
        with waits.device_wait():
            clock.now += 20e-3
    waits.end_step()
    assert waits.blocks[0].own_s[Phase.FIRST] == pytest.approx(20e-3)


def run_steps(waits: WaitRecorder, works: list[bool]) -> None:
    for has_work in works:
        waits.end_step()
        with waits.waiting(Phase.FIRST):
            pass
        waits.begin_step(has_work=has_work, num_tokens=1)
    waits.end_step()


def test_steps_behind_a_rest_do_not_count() -> None:
    waits = WaitRecorder(2, LoneFlags())
    run_steps(waits, [True, False] * 50)  # each follows a rest
    assert waits.blocks == ()
    run_steps(waits, [True] * (STEPS_OF_BLOCK + 1))
    assert len(waits.blocks) == 1


def test_so_many_blocks_are_kept_that_a_slow_reader_misses_none() -> None:
    waits = WaitRecorder(2, LoneFlags())
    run_steps(waits, [True] * (STEPS_OF_BLOCK * (KEPT_BLOCKS + 3) + 1))
    assert [block.number for block in waits.blocks] == list(range(3, KEPT_BLOCKS + 3))
