"""When the shared expert of an MoE layer runs: it depends on nothing that is routed.

On the stream of all else it runs while tokens travel to the routed experts, or after them. On a
side stream it has two halves, each beside kernels that read next to nothing: gate and up while
tokens are routed and travel, down while the experts' sums travel home. Between the two the routed
experts have the memory to themselves.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from engine.layers.mlp import MLP
from engine.layers.norm import Normed
from engine.parallel.pending import Pending, Ready
from engine.side_stream import SideStream


class SharedRun(Protocol):
    """One pass over the rows of a step, in the order of a layer."""

    def while_dispatched(self) -> None:
        """Tokens are on their way to the routed experts."""
        ...

    def while_combined(self) -> Pending[Tensor] | None:
        """Routed experts are done; return the output [T, D], or None if there is no such expert."""
        ...


StartShared = Callable[[Normed], SharedRun]
"""To be called before tokens are routed."""


def plan_shared(mlp: MLP | None, *, overlaps: bool, side_stream: SideStream | None) -> StartShared:
    """Return how the shared expert runs.

    Args:
        mlp: the expert; None for none.
        overlaps: whether it runs while tokens travel.
        side_stream: to overlap with routing too; None for the stream of all else.
    """
    if mlp is None:
        return lambda _: _Absent()
    if side_stream is None or not overlaps:
        return partial(_InOrder, mlp, overlaps)
    return partial(_Beside, mlp, side_stream)


class _Absent:
    def while_dispatched(self) -> None:
        pass

    def while_combined(self) -> None:
        return None


class _InOrder:
    def __init__(self, mlp: MLP, overlaps: bool, normed: Normed) -> None:
        self._run = partial(mlp.partial, mlp.choose(normed))
        self._overlaps = overlaps
        self._out: Tensor | None = None

    def while_dispatched(self) -> None:
        if self._overlaps:
            self._out = self._run()

    def while_combined(self) -> Pending[Tensor]:
        return Ready(self._run() if self._out is None else self._out)


class _Beside:
    def __init__(self, mlp: MLP, side_stream: SideStream, normed: Normed) -> None:
        self._mlp, self._side_stream = mlp, side_stream
        # Kept until the end of the pass: the side stream still reads it.
        self._hidden = mlp.choose(normed)
        self._activated = side_stream.start(partial(mlp.activate, self._hidden))

    def while_dispatched(self) -> None:
        pass

    def while_combined(self) -> Pending[Tensor]:
        return self._side_stream.start(partial(self._mlp.down_proj, self._activated.value))
