"""Sums and gathers of ranks that are threads, over memory that all of them write: no barrier.

What a rank reads is what lies there at that moment, so a row that a peer writes too early is a
wrong row. Ranks rest now and then, each in its own way. What GPUs do to keep the order of stores
and signals is not shown here (`test_compile_gpu`), but who may go on when.
"""

import random
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.parallel.nvlink.all_gather import GatherKernels, GatherShape, Lane, NvlinkAllGather
from engine.parallel.nvlink.reduce_scatter import NvlinkReduceScatter, ReduceShape
from engine.parallel.pair_rows import PairRows

TIMEOUT_S = 60.0


class Counters:
    """What every rank has raised at every other, by parity; a rank waits at its own."""

    def __init__(self, num_ranks: int) -> None:
        self._condition = threading.Condition()
        self._raised = [[[0] * num_ranks for _ in range(2)] for _ in range(num_ranks)]
        self._received = [0] * num_ranks

    def begin(self, rank: int) -> int:
        """Return the number of the transfer that a rank sends now."""
        return self._received[rank] + 1

    def signal(self, rank: int, owner: int, number: int) -> None:
        """Say to an owner that this rank's stores of a transfer are done."""
        with self._condition:
            self._raised[owner][number % 2][rank] += 1
            self._condition.notify_all()

    def await_all(self, rank: int) -> int:
        """Wait for all ranks' stores of the transfer that comes; return its number."""
        number = self._received[rank] + 1
        target = (number + 1) // 2
        with self._condition:
            raised = self._raised[rank][number % 2]
            came = self._condition.wait_for(lambda: min(raised) >= target, TIMEOUT_S)
            assert came, f"rank {rank} waits for transfer {number}: {raised}"
            assert max(raised) == target, "a rank has gone on too far"
            self._received[rank] = number
        return number


class SharedExchange:
    """The memory of all ranks."""

    def __init__(self, sums: ReduceShape, gathers: GatherShape, *, seed: int) -> None:
        num_ranks = sums.num_ranks
        self.sums, self.gathers, self._seed = sums, gathers, seed
        self._halves = [
            torch.full((2, num_ranks, sums.max_rows, sums.hidden_size), torch.nan).bfloat16()
            for _ in range(num_ranks)
        ]
        self._buffers = [
            torch.full((gathers.buffer_bytes,), 0xFF, dtype=torch.uint8) for _ in range(num_ranks)
        ]
        self._of_sums = Counters(num_ranks)
        self._of_lanes: dict[int, Counters] = {}
        self._lock = threading.Lock()

    def open(self, rank: int) -> tuple[NvlinkReduceScatter, NvlinkAllGather]:
        """Return what a rank sums and gathers by."""
        rest = _rests(random.Random(f"{self._seed} {rank}"))

        def open_lane(lane: Lane) -> GatherKernels:
            with self._lock:
                counters = self._of_lanes.setdefault(lane.counters, Counters(self.sums.num_ranks))
            return _SharedLane(self._buffers, lane, counters, rank, rest)

        sums = _SharedSums(self._halves, self._of_sums, rank, rest)
        return NvlinkReduceScatter(self.sums, sums), NvlinkAllGather(self.gathers, open_lane)


class _SharedSums:
    def __init__(
        self, halves: list[Tensor], counters: Counters, rank: int, rest: Callable[[], None]
    ) -> None:
        self._halves, self._counters, self._rank, self._rest = halves, counters, rank, rest

    def send(self, partial_PD: Tensor) -> None:
        number = self._counters.begin(self._rank)
        for owner, share in enumerate(partial_PD.chunk(len(self._halves))):
            self._rest()
            if owner != self._rank:
                self._halves[owner][number % 2, self._rank, : len(share)] = share
            self._counters.signal(self._rank, owner, number)

    def receive(self, partial_PD: Tensor, own_TD: Tensor | None) -> Tensor:
        self._rest()
        number = self._counters.await_all(self._rank)
        self._rest()
        mine = partial_PD.chunk(len(self._halves))[self._rank]
        total = torch.zeros(mine.shape) if own_TD is None else own_TD.float()
        for source in range(len(self._halves)):
            there = self._halves[self._rank][number % 2, source, : len(mine)]
            total = total + (mine if source == self._rank else there).float()
        return total.bfloat16()

    def send_pairs(self, pairs: PairRows) -> None:
        number = self._counters.begin(self._rank)
        assert pairs.weights_PK.is_contiguous()
        of_ranks = (x.chunk(len(self._halves)) for x in (pairs.places_PK, pairs.weights_PK))
        for owner, (places_TK, weights_TK) in enumerate(zip(*of_ranks, strict=True)):
            there = self._halves[owner][number % 2, self._rank]
            for token, places in enumerate(places_TK.tolist()):
                self._rest()
                parts = [(row, k) for k, row in enumerate(places) if row >= 0]
                if parts:
                    rows = (pairs.rows_MD[row].float() * weights_TK[token, k] for row, k in parts)
                    there[token] = torch.stack(list(rows)).sum(0).bfloat16()
            self._counters.signal(self._rank, owner, number)

    def receive_pairs(self, pairs: PairRows, own_TD: Tensor | None) -> Tensor:
        self._rest()
        number = self._counters.await_all(self._rank)
        ids_TK, half = pairs.own_ids_TK, self._halves[self._rank][number % 2]
        size = (ids_TK.shape[0], half.shape[-1])
        total = torch.zeros(size) if own_TD is None else own_TD.float()
        for token, ids in enumerate(ids_TK.tolist()):
            hit = {expert // pairs.num_local_experts for expert in ids if expert >= 0}
            for source in sorted(hit & set(range(len(self._halves)))):
                total[token] = total[token] + half[source, token].float()
        half.fill_(torch.nan)  # nobody writes there before this rank has sent again
        return total.bfloat16()


class _SharedLane:
    def __init__(
        self,
        buffers: list[Tensor],
        lane: Lane,
        counters: Counters,
        rank: int,
        rest: Callable[[], None],
    ) -> None:
        self._buffers, self._lane, self._counters = buffers, lane, counters
        self._rank, self._rest = rank, rest

    def send(self, rows_tX: Tensor) -> None:
        number = self._counters.begin(self._rank)
        sent = rows_tX.view(-1).view(torch.uint8)
        first = self._lane.first + self._rank * sent.numel()
        for owner, buffer in enumerate(self._buffers):
            self._rest()
            buffer[first : first + sent.numel()] = sent
            self._counters.signal(self._rank, owner, number)

    def receive(self, rows_tX: Tensor) -> Tensor:
        self._rest()
        self._counters.await_all(self._rank)
        num_bytes = len(self._buffers) * rows_tX.numel() * rows_tX.element_size()
        first = self._lane.first
        there = self._buffers[self._rank][first : first + num_bytes]
        return there.view(rows_tX.dtype).view(-1, *rows_tX.shape[1:])


def _rests(draw: random.Random) -> Callable[[], None]:
    """Return what a rank does now and then: nothing, mostly."""

    def rest() -> None:
        if draw.random() < 0.3:
            time.sleep(draw.random() * 1e-3)

    return rest
