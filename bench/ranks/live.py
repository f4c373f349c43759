"""One rank of a decode instance that really runs, for stretches of steps: with or without records.

What runs is what `bench.engine` measures: the server's execution, loop and lockstep. A stretch is
some steps in a row, by graphs that were captured for it; what its ranks recorded is gathered behind
it, and rank 0 looks at it as the router does, window by window.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.engine.decode import invent_requests, step_sizes
from bench.engine.drafted import DraftedRunner, DraftedSource
from bench.engine.options import DecodeOptions
from bench.engine.rank_model import RankModel
from bench.engine.requests import RunningRequests
from bench.engine.session import Session, close_session, open_session
from bench.engine.steps import BenchSteps, LoopPlace, measure_steps
from bench.engine.timing import StepTimes
from bench.ranks.judged import Blocks, JudgedBlocks
from engine.boot.warm_up import products
from engine.graphs.graph_runner import GraphRunner, capture_steps
from engine.operations import do_nothing
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.nvlink.dispatcher import NvlinkDispatcher
from engine.parallel.wait_recorder import WaitRecorder
from engine.request import ScheduledRequest
from runtime.stragglers.rank_waits import Phase, RankBlock
from runtime.stragglers.slow_ranks import Finding
from worker.engine_options import engine_options
from worker.step_driver import steps_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps in a row.

    Attributes:
        step_s: of each on this rank.
        blocks: of every rank, as many of each; none without records.
    """

    step_s: Sequence[float]
    blocks: Blocks

    @property
    def median_s(self) -> float:
        """Of a step."""
        return float(np.median(self.step_s))

    def windows(self, usual: Blocks) -> list[list[Finding]]:
        """Return what is found in the first 100 steps, in those from 20 to 120, and so on.

        Args:
            usual: blocks without a fault, that ran before: the router has seen such, too.
        """
        return JudgedBlocks(usual).hear(self.blocks)


class LiveRank:
    """See the module.

    Attributes:
        session: model, pool and plain runner.
    """

    def __init__(self, options: DecodeOptions, rank: RankModel) -> None:
        """Invent requests and a pool; all ranks call.

        Args:
            options: of a decode measurement.
            rank: the model.
        """
        self._options = options
        self._requests: RunningRequests = invent_requests(options, rank)
        self._sizes = step_sizes(options.requests, options.section.sizes.max_num_seqs)
        rank.compile_for(products(rank.model, self._sizes[-1], rows=list(self._sizes)))
        self.session: Session = open_session(
            rank,
            options.setup,
            num_blocks=self._requests.num_blocks,
            options=engine_options(options.section),
            max_tokens=self._sizes[-1],
            num_rows=len(self._requests),
        )
        self._source = DraftedSource(self._requests, None)

    def capture(self) -> GraphRunner:
        """Return what runs steps as the dispatcher and the hooks are now; all ranks call."""
        section, session = self._options.section, self.session
        if not section.wants_graphs:
            return GraphRunner(session.runner, None)
        return capture_steps(
            session.runner,
            max_num_seqs=section.sizes.max_num_seqs,
            max_model_len=session.rank.max_model_len,
            group=session.rank.groups.boot_group,
            buckets=self._sizes,
        )

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Let kernels of the body record nothing, as those of a server that is told not to."""
        dispatcher = self.session.rank.execution.dispatcher
        if isinstance(dispatcher, NvlinkDispatcher):
            from engine.parallel.nvlink.triton_exchange import TritonExchange

            real = dispatcher.buffer.exchange
            assert isinstance(real, TritonExchange), type(real)
            window = dataclasses.replace(real.window, ring=None)
            dispatcher.buffer.exchange = TritonExchange(window)
            try:
                yield
            finally:
                dispatcher.buffer.exchange = real
        elif isinstance(dispatcher, AllToAllDispatcher):
            waits, dispatcher.waits = dispatcher.waits, None
            try:
                yield
            finally:
                dispatcher.waits = waits
        else:
            yield

    def run(
        self,
        runner: GraphRunner,
        *,
        num_steps: int,
        seconds: float = 0.0,
        records: bool = True,
        between: Callable[[], None] = do_nothing,
    ) -> Stretch:
        """Run steps on all ranks; all call.

        Args:
            runner: that was captured.
            num_steps: at least.
            seconds: at least.
            records: whether waits are recorded.
            between: called between two steps of this rank.
        """
        session = self.session
        waits = self._new_waits() if records else None
        log = _BlockLog(waits)
        times = StepTimes(warm_up_s=0.0, seconds=seconds, min_steps=num_steps)

        def announce(scheduled: Sequence[ScheduledRequest]) -> None:
            if waits is not None:
                waits.num_context_tokens = sum(item.start for item in scheduled)

        def tell() -> None:
            log.look()
            between()

        driver = BenchSteps(
            self._source,
            DraftedRunner(runner, self._source),
            times,
            begin_step=session.begin_step,
            announce=announce,
            tell=tell,
        )
        place, launch_waits = session.rank.place, session.rank.model.waits_for_counts
        max_ahead = steps_ahead(self._options.section.max_ahead, launch_waits=launch_waits)
        session.settle()
        measure_steps(
            driver,
            times,
            dataclasses.replace(session, waits=waits).lockstep(),
            LoopPlace(
                rank=place.rank,
                num_ranks=place.world_size,
                device=session.device,
                max_ahead=max_ahead,
            ),
            waits=waits,
        )
        session.rank.meet()
        if waits is not None:
            waits.end_step()
            log.look()
        return Stretch(step_s=times.result().step_s, blocks=self._gather(log.blocks))

    def close(self) -> None:
        """End; all ranks call."""
        self._requests.close()
        close_session(self.session)

    def _new_waits(self) -> WaitRecorder | None:
        """Return a recorder that knows of no step yet, in the place of the one before."""
        rank = self.session.rank
        if rank.waits is None:
            return None
        waits = WaitRecorder(rank.place.world_size, rank.waits.flags)
        waits.device = rank.waits.device
        if isinstance(rank.execution.dispatcher, AllToAllDispatcher):
            rank.execution.dispatcher.waits = waits
        return waits

    def _gather(self, blocks: Sequence[RankBlock]) -> Blocks:
        num_ranks = self.session.rank.place.world_size
        counts = self.session.gather([float(len(blocks))])
        count = int(min(row[0] for row in counts))
        values = [value for block in blocks[:count] for value in _numbers_of(block)]
        rows = self.session.gather(values) if count else [[] for _ in range(num_ranks)]
        return {
            rank: [_block_of(part, num_ranks) for part in _parts(row, count)]
            for rank, row in enumerate(rows)
        }


class _BlockLog:
    """All blocks of a stretch: the recorder keeps the last of them."""

    def __init__(self, waits: WaitRecorder | None) -> None:
        self._waits = waits
        self.blocks: list[RankBlock] = []

    def look(self) -> None:
        """Take those that are new; called at least once in a few blocks."""
        for block in self._waits.blocks if self._waits is not None else ():
            if block.number == len(self.blocks):
                self.blocks.append(block)


def _numbers_of(block: RankBlock) -> list[float]:
    waits = [wait for of_phase in block.waits_s for wait in of_phase]
    firsts = [wait for of_phase in block.first_waits_s or block.waits_s for wait in of_phase]
    loads = [block.num_rows, block.num_tokens, block.num_context_tokens]
    return [block.number, *waits, *firsts, *block.own_s, *block.own_mean_s, *loads]


def _block_of(numbers: Sequence[float], num_ranks: int) -> RankBlock:
    number, *rest = numbers
    num_phases, size = len(Phase), len(Phase) * num_ranks
    waits, firsts, rest = rest[:size], rest[size : 2 * size], rest[2 * size :]
    return RankBlock(
        number=int(number),
        waits_s=[waits[p * num_ranks : (p + 1) * num_ranks] for p in Phase],
        first_waits_s=[firsts[p * num_ranks : (p + 1) * num_ranks] for p in Phase],
        own_s=rest[:num_phases],
        own_mean_s=rest[num_phases : 2 * num_phases],
        num_rows=rest[-3],
        num_tokens=rest[-2],
        num_context_tokens=rest[-1],
    )


def _parts(row: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    size = len(row) // count if count else 0
    for index in range(count):
        yield row[index * size : (index + 1) * size]
