"""When the shared expert of an MoE layer runs: it depends on nothing that is routed.

On the stream of all else it runs while tokens travel to the routed experts, or after them. On a
side stream it has two halves, each beside kernels that read next to nothing: gate and up while
tokens are routed and travel, down while the experts' sums travel home. Between the two the routed
experts have the memory to themselves. Where no sums travel, down follows at once (`SideRule`).
"""

from functools import partial
from typing import Protocol

from torch import Tensor

from engine.layers.mlp import MLP
from engine.layers.norm import Normed
from engine.parallel.pending import Pending, Ready
from engine.side_stream import SideRule, SideStream


class SharedRun(Protocol):
    """One pass over the rows of a step, in the order of a layer."""

    def while_dispatched(self) -> None:
        """Tokens are on their way to the routed experts."""
        ...

    def while_combined(self) -> Pending[Tensor] | None:
        """Routed experts are done; return the output [T, D], or None if there is no such expert."""
        ...


class SharedSchedule:
    """Decides when shared experts run."""

    def __init__(
        self,
        *,
        overlaps: bool,
        side_stream: SideStream | None,
        side_rule: SideRule | None = None,
        num_shares: int = 1,
    ) -> None:
        """Choose.

        Args:
            overlaps: whether they run while tokens travel.
            side_stream: to overlap with routing too; None for the stream of all else.
            side_rule: which steps have them there, and how; None for all, in halves.
            num_shares: ranks that have a share each of a step's rows.
        """
        self._overlaps = overlaps
        self._side_stream = side_stream if overlaps else None
        self._rule, self._num_shares = side_rule or SideRule(), num_shares

    def start(self, mlp: MLP | None, normed: Normed) -> SharedRun:
        """Begin a pass of an expert, if there is one; to be called before tokens are routed."""
        if mlp is None:
            return _Absent()
        if self._side_stream is None or not self._is_beside(normed.plain.shape[0]):
            return _InOrder(mlp, normed, overlaps=self._overlaps)
        return _Beside(mlp, normed, self._side_stream, in_halves=self._rule.in_halves)

    def _is_beside(self, num_rows: int) -> bool:
        """Return whether a step of which this rank has so many rows is one for the side stream."""
        most = self._rule.max_tokens
        return most is None or num_rows <= -(-most // self._num_shares)


class _Absent:
    def while_dispatched(self) -> None:
        pass

    def while_combined(self) -> None:
        return None


class _InOrder:
    def __init__(self, mlp: MLP, normed: Normed, *, overlaps: bool) -> None:
        self._run = partial(mlp.partial, mlp.choose(normed))
        self._overlaps = overlaps
        self._out: Tensor | None = None

    def while_dispatched(self) -> None:
        if self._overlaps:
            self._out = self._run()

    def while_combined(self) -> Pending[Tensor]:
        return Ready(self._run() if self._out is None else self._out)


class _Beside:
    def __init__(
        self, mlp: MLP, normed: Normed, side_stream: SideStream, *, in_halves: bool
    ) -> None:
        self._mlp, self._side_stream = mlp, side_stream
        rows = mlp.choose(normed)
        self._out: Pending[Tensor] | None = None
        if in_halves:
            self._activated = side_stream.start(partial(mlp.activate, rows))
        else:
            self._out = side_stream.start(partial(mlp.partial, rows))

    def while_dispatched(self) -> None:
        pass

    def while_combined(self) -> Pending[Tensor]:
        return self._side_stream.start(self._run_down) if self._out is None else self._out

    def _run_down(self) -> Tensor:
        out_TD: Tensor = self._mlp.down_proj(self._activated.value)
        return out_TD
