"""Work on static memory that can be done again: captured in a CUDA graph, or simply called.

What is captured must have been run before (kernels compile and libraries allocate on first use) and
must neither read the device nor allocate memory that somebody outside keeps. All graphs share one
pool of memory, because only one runs at a time; captured from the largest to the smallest, each
fits into what the first one needed.

Work of which somebody waits for a part may be captured in pieces, one graph each: what the first
ones did can be waited for while the others run.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import torch

from engine.graphs.capture_errors import agree_on_capture
from engine.kernels.fused.dependent import break_chain
from engine.operations import do_nothing
from engine.parallel.groups import RankGroup
from engine.streams import Streams, StreamUse

WARM_UP_RUNS = 2

CaptureProgress = Callable[[int, int], None]
"""Told how many of how many graphs there are."""


class Replayable(Protocol):
    """Does what was captured, on the current stream."""

    def replay(self) -> None:
        """Issue the work; the host does not wait."""
        ...

    def reset(self) -> None:
        """Forget it, and what it holds: a group whose collectives it contains cannot end before."""
        ...


WorkInPieces: TypeAlias = Callable[[Callable[[], None]], None]
"""Work that calls what it is given between two of its pieces."""


class ReplayableInPieces(Protocol):
    """Does what was captured, piece by piece, on the current stream."""

    def replay(self, between: Callable[[], None] = do_nothing) -> None:
        """Issue the work; the host does not wait. Calls `between` between two pieces."""
        ...

    def reset(self) -> None:
        """See `Replayable`."""
        ...


class Pieces:
    """What was captured in several graphs, issued one behind the other."""

    def __init__(self, graphs: Sequence[Replayable]) -> None:
        """Take at least one, in the order of the work."""
        self._graphs = tuple(graphs)

    def replay(self, between: Callable[[], None] = do_nothing) -> None:
        """See `ReplayableInPieces`."""
        *others, last = self._graphs
        for graph in others:
            graph.replay()
            between()
        last.replay()

    def reset(self) -> None:
        """See `Replayable`."""
        for graph in self._graphs:
            graph.reset()


class CalledPieces:
    """The same work without graphs."""

    def __init__(self, work: WorkInPieces) -> None:
        self._work = work

    def replay(self, between: Callable[[], None] = do_nothing) -> None:
        """See `ReplayableInPieces`."""
        self._work(between)

    def reset(self) -> None:
        """Nothing is held."""


class Eager:
    """The same work without a graph: on a CPU, or to compare with."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        """See `Replayable`."""
        self._work()

    def reset(self) -> None:
        """Nothing is held."""


class Capture:
    """Makes graphs that share their memory."""

    def __init__(self, streams: Streams) -> None:
        """Prepare a stream and a pool.

        Args:
            streams: of a CUDA device.
        """
        self._stream = streams.of(StreamUse.CAPTURE)
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # what is freed during a capture would be freed into the graphs' pool
        torch.cuda.empty_cache()

    def graph(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run `work` to warm up, then capture it."""
        (graph,) = self._capture(lambda cut: work())
        return graph

    def in_pieces(self, work: WorkInPieces) -> Pieces:
        """Do the same with work that says where one graph is to end and the next to begin.

        No stream beside the current one may have work of it then.
        """
        return Pieces(self._capture(work))

    def _capture(self, work: WorkInPieces) -> list[torch.cuda.CUDAGraph]:
        """Return the graphs of `work`, in order."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # Other threads may use the device meanwhile: only what this thread does is checked.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()
            break_chain()  # in its graph the next kernel is the first one

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                work(do_nothing)
            self._stream.synchronize()
            begin()
            try:
                work(cut)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graphs[-1].capture_end()  # says once more what went wrong
                raise
            graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graphs


class CapturedSteps(Protocol):
    """Steps of some sizes: `step_graphs.StepGraphs` or `chunk_graphs.ChunkGraphs`."""

    def capture(
        self, progress: CaptureProgress | None = None, *, group: RankGroup | None = None
    ) -> None:
        """Capture every size; all ranks that share the model call."""
        ...

    def close(self) -> None:
        """Forget what was captured."""
        ...


def capture_or_close(
    steps: CapturedSteps, progress: CaptureProgress | None, group: RankGroup | None
) -> None:
    """Capture, or forget what was captured before it failed and raise."""
    try:
        steps.capture(progress, group=group)
    except BaseException:
        steps.close()  # now, and not when nobody refers to them any more
        raise


def capture_each(
    buckets: Sequence[int], capture: Callable[[int], None], group: RankGroup | None
) -> Iterator[int]:
    """Capture every size, the largest first, and yield it once all ranks have.

    Args:
        buckets: sizes, ascending.
        capture: one of them, with all its graphs.
        group: all ranks that capture together, for host memory; None for a rank alone.

    Raises:
        CaptureError: a rank could not, which all of them say.
        RuntimeError: of this rank's device.
        PeerLostError: another rank ended.
    """
    for bucket in reversed(buckets):
        failure = None
        try:
            capture(bucket)
        except RuntimeError as error:
            failure = error
        agree_on_capture(group or RankGroup(), failure)
        yield bucket
