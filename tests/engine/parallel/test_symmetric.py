"""A symmetric group whose peers are threads: addresses, slots and results, without a GPU."""

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from engine.parallel.groups import RankGroup
from engine.parallel.pending import Ready
from engine.parallel.symmetric import (
    SymmetricGroup,
    SymmetricOptions,
    counters_of,
    open_symmetric_group,
    plan_of,
)

TIMEOUT_S = 60.0


class ThreadStreams:
    """All side streams of a rank as its own thread: work is done when it is launched."""

    def __init__(
        self, changed: threading.Condition, counters: tuple[list[list[int]], list[list[int]]]
    ) -> None:
        self._changed = changed
        self._own_counters, self._peer_counters = counters

    def fork(self, streams: Sequence[int]) -> None:
        assert len(set(streams)) == len(streams)

    def copy(self, stream: int, destination: int, source: int, nbytes: int) -> None:
        ctypes.memmove(destination, source, nbytes)

    def put(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        with self._changed:
            for peer in peers:
                _counter(self._peer_counters[channel][peer]).value = generation
            self._changed.notify_all()

    def wait(self, stream: int, peers: Sequence[int], channel: int, generation: int) -> None:
        counters = [_counter(self._own_counters[channel][peer]) for peer in peers]

        def is_there() -> bool:
            return all(counter.value >= generation for counter in counters)

        with self._changed:
            assert self._changed.wait_for(is_there, TIMEOUT_S), "waits for ever"

    def on(self, stream: int) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self, streams: Sequence[int]) -> Callable[[], None]:
        return lambda: None


def _counter(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


class Fallback(RankGroup):
    """Tells that it was asked."""

    __slots__ = ()

    def start_all_gather(self, x: Tensor) -> Ready[Tensor]:
        return Ready(torch.full((1,), -1.0))

    def start_reduce_scatter(self, x_TD: Tensor) -> Ready[Tensor]:
        return Ready(torch.full((1,), -2.0))


def open_groups(size: int, options: SymmetricOptions) -> list[SymmetricGroup]:
    ranks = [Fallback(rank=rank, size=size) for rank in range(size)]
    plan = plan_of(ranks[0], options)
    # A counter or slice at a wrong offset would meet garbage, not zeros.
    buffers = [torch.full((plan.nbytes,), 0xAA, dtype=torch.uint8) for _ in ranks]
    for buffer in buffers:
        buffer[: plan.counter_bytes] = 0
    bases = [buffer.data_ptr() for buffer in buffers]
    changed = threading.Condition()
    return [
        SymmetricGroup(
            rank,
            buffer,
            bases,
            ThreadStreams(changed, counters_of(plan, rank.rank, bases)),
            options=options,
        )
        for rank, buffer in zip(ranks, buffers, strict=True)
    ]


def draw(rank: int, number: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: their sums are exact in every order."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-8, 9, (rows, 3), generator=generator).to(dtype)


def run_rank(group: SymmetricGroup, num_collectives: int, seed: int) -> None:
    """Random collectives, the same on all ranks, up to `num_slots` in flight."""
    order, ranks = random.Random(seed), range(group.size)
    flying: deque[tuple[object, Tensor]] = deque()
    for number in range(num_collectives):
        rows = order.randint(1, 5)
        dtype = order.choice([torch.float32, torch.bfloat16])
        if order.random() < 0.5:
            inputs = [draw(rank, number, rows, dtype) for rank in ranks]
            pending = group.start_all_gather(inputs[group.rank])
            expected = torch.cat(inputs)
        else:
            inputs = [draw(rank, number, rows * group.size, dtype) for rank in ranks]
            # A transposed source: not contiguous.
            pending = group.start_reduce_scatter(inputs[group.rank].t().contiguous().t())
            expected = sum(inputs, torch.zeros(())).to(dtype)[group.rank * rows :][:rows]
        flying.append((pending, expected))
        while len(flying) > order.randint(0, 3):
            done, wanted = flying.popleft()
            actual = done.wait()  # type: ignore[attr-defined]
            assert actual.dtype == wanted.dtype
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_results_are_those_of_a_plain_loop(size: int, num_slots: int) -> None:
    groups = open_groups(size, SymmetricOptions(max_bytes=4096, num_slots=num_slots))
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda group: run_rank(group, 40, seed=size), groups, timeout=60))


def test_what_does_not_fit_goes_the_ordinary_way() -> None:
    group = open_groups(2, SymmetricOptions(max_bytes=64))[0]
    assert group.start_all_gather(torch.zeros(3, 3)).wait().item() == -1.0
    assert group.start_reduce_scatter(torch.zeros(6, 3)).wait().item() == -2.0
    assert group.start_all_gather(torch.zeros(0, 3)).wait().item() == -1.0
    assert group.start_all_gather(torch.zeros(1, 3, device="meta")).wait().item() == -1.0


def test_no_group_without_peers_or_gpu() -> None:
    assert open_symmetric_group(RankGroup(), torch.device("cuda", 0)) is None
    assert open_symmetric_group(RankGroup(rank=0, size=2), torch.device("cpu")) is None
