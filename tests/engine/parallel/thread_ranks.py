"""Many ranks in one process: a thread each, and collectives that really exchange tensors.

For semantics at widths that no test machine has processes for, 72 ranks say. The key idea: every
rank numbers its meetings, and a meeting checks that all ranks came for the same thing; so a rank
that takes another order than the others fails a test instead of hanging it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.parallel.pending import Deferred, Pending

T = TypeVar("T")

TIMEOUT_S = 60.0


class Meetings:
    """Where ranks leave something for one another."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._condition = threading.Condition()
        self._left: dict[tuple[str, int], dict[int, tuple[str, Any]]] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._broken = False

    def leave(self, channel: str, rank: int, purpose: str, content: Any) -> int:
        """Leave content for the next meeting of a channel; return the meeting's number."""
        with self._condition:
            number = self._counts.get((channel, rank), 0)
            self._counts[channel, rank] = number + 1
            self._left.setdefault((channel, number), {})[rank] = (purpose, content)
            self._condition.notify_all()
            return number

    def collect(self, channel: str, number: int) -> list[Any]:
        """Wait for all ranks, and return what they left, by rank."""
        with self._condition:
            meeting = self._left[channel, number]
            came = self._condition.wait_for(
                lambda: len(meeting) == self.num_ranks or self._broken, TIMEOUT_S
            )
            assert came, f"{channel} {number}: only ranks {sorted(meeting)} came"
            assert not self._broken, "another rank failed"
            purposes = {purpose for purpose, _ in meeting.values()}
            assert len(purposes) == 1, f"{channel} {number}: ranks came for {purposes}"
            return [meeting[rank][1] for rank in range(self.num_ranks)]

    def exchange(self, channel: str, rank: int, purpose: str, content: Any) -> list[Any]:
        """Leave and collect."""
        return self.collect(channel, self.leave(channel, rank, purpose, content))

    def give_up(self) -> None:
        """Let nobody wait any longer."""
        with self._condition:
            self._broken = True
            self._condition.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadGroup(RankGroup):
    """One axis of ranks that are threads; their meetings are the library's collectives."""

    meetings: Meetings = field(default_factory=lambda: Meetings(1))

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = self.meetings.exchange("group", self.rank, f"gather {tensor.shape}", tensor.clone())
        return torch.cat(parts)

    def _start_library_all_gather(self, x: Tensor) -> Pending[Tensor]:
        number = self.meetings.leave("group", self.rank, f"gather {x.shape}", x.clone())
        return Deferred(lambda: torch.cat(self.meetings.collect("group", number)))

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(
            self.meetings.exchange("group", self.rank, f"broadcast {tensor.shape}", tensor.clone())[
                0
            ]
        )

    def start_all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        number = self.meetings.leave("group", self.rank, f"sum {tensor.shape}", tensor.clone())
        return Deferred(
            lambda: tensor.copy_(torch.stack(self.meetings.collect("group", number)).sum(0))
        )

    def start_all_to_all(
        self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]
    ) -> Pending[Tensor]:
        parts = rows.clone().split(list(num_sent))
        number = self.meetings.leave("group", self.rank, "exchange", parts)

        def collect() -> Tensor:
            mine = [parts[self.rank] for parts in self.meetings.collect("group", number)]
            assert [len(part) for part in mine] == list(num_received)
            return torch.cat(mine)

        return Deferred(collect)

    def _start_library_reduce_scatter(self, x_TD: Tensor) -> Pending[Tensor]:
        assert x_TD.shape[0] % self.size == 0
        parts = x_TD.clone().tensor_split(self.size)
        number = self.meetings.leave("group", self.rank, f"scatter {x_TD.shape}", parts)

        def collect() -> Tensor:
            mine = [parts[self.rank] for parts in self.meetings.collect("group", number)]
            return torch.stack(mine).float().sum(0).to(x_TD.dtype)

        return Deferred(collect)


def thread_groups(rank: int, meetings: Meetings) -> ProcessGroups:
    """Return the axes of one data-parallel rank with experts over all."""
    size = meetings.num_ranks
    group = ThreadGroup(rank=rank, size=size, meetings=meetings)
    return ProcessGroups(dims=ParallelDims(dp=size, ep=size, rank=rank), ep_group=group)


def thread_head_groups(rank: int, meetings: Meetings) -> ProcessGroups:
    """Return the axes of a rank that splits heads with the others, and shares experts with them."""
    size = meetings.num_ranks
    group = ThreadGroup(rank=rank, size=size, meetings=meetings)
    dims = ParallelDims(tp=size, ep=size, rank=rank)
    return ProcessGroups(dims=dims, tp_group=group, ep_group=group)


def run_ranks(num_ranks: int, body: Callable[[int, Meetings], T]) -> list[T]:
    """Run `body(rank, meetings)` in a thread per rank; return the results, or raise one error."""
    meetings, results, errors = Meetings(num_ranks), {}, {}

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = body(rank, meetings)
        except BaseException as error:  # handed to the caller below
            errors.setdefault("first", error)
            meetings.give_up()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors["first"]
    return [results[rank] for rank in range(num_ranks)]
