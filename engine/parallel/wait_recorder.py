"""What one rank records of its waits for the others: for whom, how long, and what it did before.

The engine loop's thread writes, a few additions a meeting; whoever reports takes whole blocks, from
any thread. Only steps that follow a step directly are counted, which all ranks know alike: before
the first step after a rest each has slept as long as it liked.

On a GPU the layers' meetings are the device's: it records them, and what it has recorded of a step
is read when it is on the host, some steps later (`DeviceWaits`). The host's own work is then what
it does while it does not wait for the device; and of that, and of its waits, only as much counts as
the device stood idle: what a running step hides costs nobody anything.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from engine.parallel.device_waits import DeviceWaits, WaitReading
from engine.parallel.rank_flags import RankFlags
from runtime.stragglers.rank_waits import STEPS_OF_BLOCK, Floats, Phase, RankBlock
from runtime.stragglers.robust import middle_mean

KEPT_BLOCKS: Final = 10
"""For a reader that comes once a second."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Step:
    """Attributes as of `RankBlock`, of one step: [P, R] waits and [P] own, in seconds."""

    waits_s: Floats
    own_s: Floats
    first_waits_s: Floats | None = None
    num_rows: int = 0
    num_tokens: int = 0
    num_context_tokens: int = 0
    counts: bool = False
    reading: WaitReading | None = field(default=None, repr=False)

    @property
    def is_complete(self) -> bool:
        """Whether all is there that was recorded of it."""
        return self.reading is None or self.reading.is_done

    def complete(self) -> None:
        """Add what the device has recorded, also where the step does not count: steps are told
        apart by the readings before them.
        """
        if self.reading is not None:
            found = self.reading.take()
            # So far there is the host's part alone, of which all is of the first phase.
            meeting_s = np.minimum(self.waits_s, found.idle_s)
            self.waits_s = found.waits_s + meeting_s
            self.first_waits_s = found.first_s + meeting_s
            self.own_s = found.own_s + np.minimum(self.own_s, found.idle_s)
            idle_s = min(found.idle_s, float(found.own_s[Phase.FIRST]))
            self.own_s[Phase.FIRST] -= idle_s  # no work of the device
            self.num_rows += found.num_rows


class WaitRecorder:
    """See the module; one for all layers of a rank."""

    def __init__(
        self,
        num_ranks: int,
        flags: RankFlags,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock`: seconds of this rank; others' are never compared with it."""
        self.flags, self._clock = flags, clock
        self._num_ranks = num_ranks
        self._blocks: tuple[RankBlock, ...] = ()
        self._num_steps = 0
        self._is_open = self._follows = False
        self._is_first = True
        self._left_at = clock()
        self.num_context_tokens = 0
        """Whose KV the coming step reads; whoever plans it says so."""
        self.device: DeviceWaits | None = None
        """What the device records of layers; set before the first step, as on all ranks."""
        self._ended: deque[_Step] = deque()  # of which the device may still have to tell
        self._of_block: list[_Step] = []
        self._step = self._new_step()

    @property
    def blocks(self) -> tuple[RankBlock, ...]:
        """The last of them, oldest first; for any thread."""
        return self._blocks

    def announce(self) -> None:
        """Tell the others that what we owe them is on its way."""
        self.flags.send()

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
            self.flags.send()
        ready = self._clock()
        self._step.own_s[phase] += ready - self._left_at
        waits, clock = self._step.waits_s[phase], self._clock

        def arrived(source: int) -> None:
            waits[source] += clock() - ready

        self.flags.receive(arrived)
        yield
        self._left_at = self._clock()

    def received(self, num_rows: int) -> None:
        """Our experts got so many rows in a layer."""
        self._step.num_rows += num_rows

    def launched(self) -> None:
        """Our part of the step that the ranks have met for is launched, whatever it was."""
        if self.device is not None:
            self._step.reading = self.device.start_reading()

    @contextlib.contextmanager
    def device_wait(self) -> Iterator[None]:
        """Wait for the device in the body: that is no work of the host's.

        Where the device records nothing it counts, as all the time that it takes for a step does.
        """
        began = self._clock()
        yield
        if self.device is not None:
            self._left_at += self._clock() - began

    def end_step(self) -> None:
        """The step before is over, if there was one; called before the ranks meet for the next."""
        if self._is_open:
            self._ended.append(self._step)
        self._step = self._new_step()
        self._is_first = True
        while self._ended and self._ended[0].is_complete:
            step = self._ended.popleft()
            step.complete()
            if step.counts:
                self._count(step)

    def begin_step(self, *, has_work: bool, num_tokens: int) -> None:
        """The ranks have met; `has_work` says the same on all of them."""
        self._follows, self._is_open = self._is_open and has_work, has_work
        self._step.counts = self._follows
        self._step.num_tokens = num_tokens
        self._step.num_context_tokens = self.num_context_tokens
        if has_work and self.device is not None:
            self.device.begin_step()

    def close(self) -> None:
        """Of the flags, too."""
        self.flags.close()

    def _new_step(self) -> _Step:
        num_phases = len(Phase)
        return _Step(waits_s=np.zeros((num_phases, self._num_ranks)), own_s=np.zeros(num_phases))

    def _count(self, step: _Step) -> None:
        self._of_block.append(step)
        self._num_steps += 1
        if len(self._of_block) == STEPS_OF_BLOCK:
            block = self._finished_block()
            self._blocks = (*self._blocks[-KEPT_BLOCKS + 1 :], block)
            self._of_block = []

    def _finished_block(self) -> RankBlock:
        steps = self._of_block
        own = np.array([step.own_s for step in steps])  # [steps, P]
        waits = [step.waits_s for step in steps]
        firsts = [step.first_waits_s for step in steps if step.first_waits_s is not None]
        return RankBlock(
            number=self._num_steps // STEPS_OF_BLOCK - 1,
            waits_s=middle_mean(np.array(waits), 0).tolist(),
            first_waits_s=middle_mean(np.array(firsts), 0).tolist() if firsts else (),
            own_s=middle_mean(own, 0).tolist(),
            own_mean_s=own.mean(axis=0).tolist(),
            num_rows=sum(step.num_rows for step in steps) / STEPS_OF_BLOCK,
            num_tokens=sum(step.num_tokens for step in steps) / STEPS_OF_BLOCK,
            num_context_tokens=sum(step.num_context_tokens for step in steps) / STEPS_OF_BLOCK,
        )
