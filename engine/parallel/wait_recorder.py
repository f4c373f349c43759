"""What one rank records of its waits for the others: for whom, how long, and what it did before.

The engine loop's thread writes, a few additions a meeting; whoever reports takes whole blocks, from
any thread. Only steps that follow a step directly are counted, which all ranks know alike: before
the first step after a rest each has slept as long as it liked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from engine.parallel.rank_flags import RankFlags
from runtime.rank_waits import STEPS_OF_BLOCK, Phase, RankBlock

KEPT_BLOCKS: Final = 10
"""For a reader that comes once a second."""


class WaitRecorder:
    """See the module; one for all layers of a rank."""

    def __init__(
        self,
        num_ranks: int,
        flags: RankFlags,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock`: seconds of this rank; others' are never compared with it."""
        self._flags, self._clock = flags, clock
        self._num_ranks = num_ranks
        self._blocks: tuple[RankBlock, ...] = ()
        self._num_steps = 0
        self._is_open = self._follows = False
        self._is_first = True
        self._left_at = clock()
        self.num_context_tokens = 0
        """Whose KV the coming step reads; whoever plans it says so."""
        self._reset_block()
        self._reset_step()

    @property
    def blocks(self) -> tuple[RankBlock, ...]:
        """The last of them, oldest first; for any thread."""
        return self._blocks

    def announce(self) -> None:
        """Tell the others that what we owe them is on its way."""
        self._flags.send()

    @contextlib.contextmanager
    def waiting(self, phase: Phase, *, is_announced: bool = False) -> Iterator[None]:
        """Wait for all others, and then for the collective in the body, which is no work of ours.

        Args:
            phase: that ends now. Of a step's first dispatch it becomes `Phase.FIRST`.
            is_announced: `announce` was called before.

        Raises:
            PeerLostError: another rank is gone.
        """
        if phase is Phase.DISPATCH and self._is_first:
            phase, self._is_first = Phase.FIRST, False
        if not is_announced:
            self._flags.send()
        ready = self._clock()
        self._own[phase] += ready - self._left_at
        waits, clock = self._waits[phase], self._clock

        def arrived(source: int) -> None:
            waits[source] += clock() - ready

        self._flags.receive(arrived)
        yield
        self._left_at = self._clock()

    def received(self, num_rows: int) -> None:
        """Our experts got so many rows in a layer."""
        self._num_rows += num_rows

    def end_step(self) -> None:
        """The step before is over, if there was one; called before the ranks meet for the next."""
        if self._is_open and self._follows:
            self._count_step()
        self._reset_step()

    def begin_step(self, *, has_work: bool, num_tokens: int) -> None:
        """The ranks have met; `has_work` says the same on all of them."""
        self._follows, self._is_open = self._is_open and has_work, has_work
        self._num_tokens = num_tokens

    def close(self) -> None:
        """Of the flags, too."""
        self._flags.close()

    def _reset_step(self) -> None:
        self._waits = [[0.0] * self._num_ranks for _ in Phase]
        self._own = [0.0 for _ in Phase]
        self._num_rows = 0
        self._is_first = True

    def _reset_block(self) -> None:
        self._waits_of_steps: list[list[list[float]]] = []
        self._own_of_steps: list[list[float]] = []
        self._rows_of_block = self._tokens_of_block = self._context_of_block = 0

    def _count_step(self) -> None:
        self._waits_of_steps.append(self._waits)
        self._own_of_steps.append(self._own)
        self._rows_of_block += self._num_rows
        self._tokens_of_block += self._num_tokens
        self._context_of_block += self.num_context_tokens
        self._num_steps += 1
        if self._num_steps % STEPS_OF_BLOCK == 0:
            block = self._finished_block()
            self._blocks = (*self._blocks[-KEPT_BLOCKS + 1 :], block)
            self._reset_block()

    def _finished_block(self) -> RankBlock:
        own = np.array(self._own_of_steps)  # [steps, P]
        return RankBlock(
            number=self._num_steps // STEPS_OF_BLOCK - 1,
            waits_s=np.median(np.array(self._waits_of_steps), axis=0).tolist(),
            own_s=np.median(own, axis=0).tolist(),
            own_mean_s=own.mean(axis=0).tolist(),
            num_rows=self._rows_of_block / STEPS_OF_BLOCK,
            num_tokens=self._tokens_of_block / STEPS_OF_BLOCK,
            num_context_tokens=self._context_of_block / STEPS_OF_BLOCK,
        )
