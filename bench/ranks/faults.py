"""Faults of ranks that really run: one at a time, put in from outside, the engine knows of none.

What is slower before a dispatch is a kernel that spins (on a CPU a sleep) where the layer's experts
are chosen; rows are those of other tables of experts; a host sleeps where its loop tells its news.
A slow link is an exchange that sends one rank its rows by a detour (`slow_link`), and on a CPU
flags that come late.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.engine.session import Session
from engine.operations import do_nothing
from engine.parallel.nvlink.dispatcher import NvlinkDispatcher
from engine.parallel.rank_flags import SocketFlags
from runtime.errors import ConfigError
from runtime.stragglers.slow_ranks import SlowKind

Place = tuple[SlowKind, int, int]
"""Kind, rank, and of a link the source."""

_PROBE_CYCLES = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFault:
    """One fault; what is 0 is as ever.

    Attributes:
        name: as it is asked for.
        kind: that should be found.
        ranks: that it befalls; of a link the one that waits.
        source: of a link, the rank that is waited for; else -1.
        attention: share of the work before a dispatch that comes on top.
        rows: share of its experts' rows that come on top.
        link_s: that a link takes longer, at least.
        sleep: of the host between two steps, in steps.
        every: of so many steps one is slept before.
    """

    name: str
    kind: SlowKind
    ranks: tuple[int, ...]
    source: int = -1
    attention: float = 0.0
    rows: float = 0.0
    link_s: float = 0.0
    sleep: float = 0.0
    every: int = 1

    @property
    def places(self) -> frozenset[Place]:
        """What should be found, and where."""
        return frozenset((self.kind, rank, self.source) for rank in self.ranks)

    @property
    def is_captured(self) -> bool:
        """Whether it is part of the steps' graphs."""
        return bool(self.attention or self.link_s)


def faults_of(*, attention: float, rows: float, link_s: float) -> Sequence[LiveFault]:
    """Return those that are tried, in order; for four ranks.

    Args:
        attention: see `LiveFault`.
        rows: see there.
        link_s: see there.
    """
    sender, host = SlowKind.SENDER, SlowKind.HOST
    return (
        LiveFault(name="attention", kind=sender, ranks=(1,), attention=attention),
        LiveFault(name="attention-of-two", kind=sender, ranks=(0, 2), attention=attention),
        LiveFault(name="rows", kind=SlowKind.RECEIVER, ranks=(3,), rows=rows),
        LiveFault(name="link", kind=SlowKind.LINK, ranks=(1,), source=2, link_s=link_s),
        LiveFault(name="host", kind=host, ranks=(2,), sleep=1.5),
        LiveFault(name="host-pauses", kind=host, ranks=(0,), sleep=3.0, every=10),
    )


def spinning(device: torch.device, seconds: float) -> Callable[[], None]:
    """Return what makes the stream, or on a CPU the thread, busy for so long."""
    if device.type != "cuda":
        return lambda: time.sleep(seconds)
    first, last = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    for _ in range(2):  # the first brings the clock up
        first.record()
        torch.cuda._sleep(_PROBE_CYCLES)  # type: ignore[no-untyped-call]
        last.record()
        last.synchronize()
    cycles = int(seconds * _PROBE_CYCLES / (1e-3 * first.elapsed_time(last)))
    return lambda: torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def skewed(draws_SCTK: Tensor, rank: int, num_ranks: int, num_experts: int, more: float) -> Tensor:
    """Return tables in which a rank's experts get a share more rows than the mean.

    Every choice of another rank's expert becomes, by chance, that of the rank's in the same place
    among its own, unless the token has that one already.

    Args:
        draws_SCTK: experts, -1 for none.
        rank: that gets more.
        num_ranks: R.
        num_experts: of all of them.
        more: the share.
    """
    num_local = num_experts // num_ranks
    generator = torch.Generator(device=draws_SCTK.device).manual_seed(rank)
    result = draws_SCTK.clone()
    # One choice after another: which a token has already changes.
    for k in range(result.shape[-1]):
        old = result[..., k]
        new = rank * num_local + old % num_local
        is_drawn = torch.rand(old.shape, generator=generator, device=old.device) < more / (
            num_ranks - 1
        )
        is_free = (result != new.unsqueeze(-1)).all(dim=-1)
        is_moved = is_drawn & is_free & (old >= 0)
        result[..., k] = torch.where(is_moved, new, old)
    return result


def sleeper(fault: LiveFault, rank: int, step_s: float) -> Callable[[], None]:
    """Return what a rank's loop calls between two steps."""
    if not fault.sleep or rank not in fault.ranks:
        return do_nothing
    num_calls = 0

    def sleep() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls % fault.every == 0:
            time.sleep(fault.sleep * step_s)

    return sleep


@contextlib.contextmanager
def captured_fault(fault: LiveFault, session: Session, work_s: float) -> Iterator[None]:
    """Put what a step's kernels have of it into what is captured, or run, in the body.

    Args:
        fault: that befalls some rank.
        session: of this rank.
        work_s: that a rank does before each dispatch.
    """
    rank, model = session.rank.place.rank, session.rank
    if fault.attention and rank in fault.ranks:
        usual = model.routing.before  # of a rank that is slowed to be like the others
        spin = spinning(session.device, fault.attention * work_s)
        model.routing.before = partial(_one_after_other, usual, spin)
        try:
            yield
        finally:
            model.routing.before = usual
    elif fault.link_s and rank == fault.source:
        with _slow_link(session, fault.ranks[0], fault.link_s):
            yield
    else:
        yield


def _one_after_other(first: Callable[[], None], then: Callable[[], None]) -> None:
    first()
    then()


def _slow_link(
    session: Session, target: int, seconds: float
) -> contextlib.AbstractContextManager[None]:
    dispatcher, waits = session.rank.execution.dispatcher, session.rank.waits
    if isinstance(dispatcher, NvlinkDispatcher):
        from bench.ranks.slow_link import slowed

        num_layers = session.rank.measured.config.num_moe_layers
        return slowed(dispatcher.buffer, target, seconds, num_layers)
    if waits is None or not isinstance(waits.flags, SocketFlags):
        name = type(dispatcher).__name__
        raise ConfigError("faults", "link", f"nothing slows links of {name}", "leave it out")
    return _late_flags(waits.flags, target, seconds)


class _LateSocket:
    """A connection whose bytes leave late, in their order."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds
        self._sender = ThreadPoolExecutor(max_workers=1)

    def sendall(self, data: bytes) -> None:
        due = time.monotonic() + self._seconds
        self._sender.submit(self._send, data, due)

    def flush(self) -> None:
        """Wait until all have left."""
        self._sender.shutdown()

    def _send(self, data: bytes, due: float) -> None:
        time.sleep(max(0.0, due - time.monotonic()))
        self._inner.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextlib.contextmanager
def _late_flags(flags: SocketFlags, target: int, seconds: float) -> Iterator[None]:
    real = flags.sockets[target]
    late: Any = _LateSocket(real, seconds)
    flags.sockets[target] = late
    try:
        yield
    finally:
        late.flush()
        flags.sockets[target] = real
