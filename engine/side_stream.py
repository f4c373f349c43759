"""A second stream of a GPU, for work whose result is wanted only later.

The key idea: a step is a chain of kernels, some of which read gigabytes and others nearly nothing:
a router, tokens on their way. Work that reads much and depends on neither is started beside them.
Both streams take the same part in a CUDA graph that is captured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from engine.kernels.fused.dependent import break_chain
from engine.kernels.launches import Launches, choose_side_launches
from engine.streams import Streams, StreamUse

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Started(Generic[T]):
    """A `Pending` of a side stream.

    Attributes:
        value: the result, for other work of the same side stream.
        stream: that makes it.
        work: kept with all that it reads, which must not be given back before it is read.
    """

    value: T
    stream: torch.cuda.Stream
    work: Callable[[], T]

    def wait(self) -> T:
        """See `Pending`."""
        torch.cuda.current_stream().wait_stream(self.stream)
        break_chain()  # what comes next waits for two kernels, not for the one before it alone
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRule:
    """Which steps have the shared expert on a side stream, and how it runs there.

    Attributes:
        max_tokens: of a step, at most, those of all ranks that share it; None for any number.
        in_halves: down begins when the routed experts are done, beside what their sums do then;
            else right behind gate and up, for a rank whose sums travel nowhere.
    """

    max_tokens: int | None = None
    in_halves: bool = True


class SideStream:
    """Starts work beside the current stream; work of one side stream runs in order."""

    def __init__(self, streams: Streams, use: StreamUse = StreamUse.SHARED_EXPERT) -> None:
        """Take the streams of a CUDA device, and for what one of them is."""
        self._stream = streams.of(use)
        self._launches: Launches = choose_side_launches(streams.device)

    def start(self, work: Callable[[], T]) -> Started[T]:
        """Launch `work` behind all that the current stream has been given so far.

        What `work` refers to stays until the result is dropped; so that has to be kept until it, or
        later work of this side stream, was waited for. What `work` allocates belongs to the side
        stream and goes back to it.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), self._launches():
            return Started(work(), self._stream, work)
