"""Dependent launches: bring a kernel onto the GPU while the one before it still runs.

Between two kernels of a stream a GPU idles for about a microsecond: the first has to end, and the
second has to be brought in. A dependent launch (CUDA's programmatic dependent launch) does the
latter ahead of time; the kernel then waits on the GPU. Captured in a graph, it stays what it is.

The key idea is what makes it safe: such a kernel waits before it does anything else, and the code
here writes the wait into it, so that no author of a kernel can forget. A wait ends when the kernel
before has ended, and what that wrote can be read. As the one before has waited itself, all before
it have ended too. A kernel of somebody else's that may end without having waited breaks this chain
(`break_chain`): what we launch next is then launched as usual, behind everything. And as a kernel
of ours lets the next one come at once, the next one must be one that waits: before somebody else's
dependent launch that does not, ours is launched as usual too, and lets nothing come before it ends.

A collective runs on a stream of its library's own: who waits for one breaks the chain too, because
what comes next has two kernels to wait for.

Nothing here is for long steps of prefill, where the idle time between kernels does not count.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

WAIT = ("tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()")
"""Wait for the kernel before; then let the next one come."""


@dataclass(slots=True)
class _Chain:
    is_whole: bool = True


_chain: ContextVar[_Chain | None] = ContextVar("dependent_launches", default=None)


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Launch our kernels as dependent ones in this block, on this thread."""
    token = _chain.set(_Chain())
    try:
        yield
    finally:
        _chain.reset(token)


@contextmanager
def ordinary_launches() -> Iterator[None]:
    """Launch our kernels in this block, on this thread, behind what their stream waits for."""
    token = _chain.set(None)
    try:
        yield
    finally:
        _chain.reset(token)


def break_chain() -> None:
    """Say that a kernel was launched that may end before those in front of it have ended."""
    chain = _chain.get()
    if chain is not None:
        chain.is_whole = False


def is_chained() -> bool:
    """Return whether this thread launches dependent kernels."""
    return _chain.get() is not None


def joins_chain() -> bool:
    """Return whether the launch that now follows, and that mends the chain, may be dependent."""
    chain = _chain.get()
    if chain is None:
        return False
    was_whole, chain.is_whole = chain.is_whole, True
    return was_whole


def with_wait(source: str) -> str:
    """Return the source of a kernel with the wait before its first statement.

    Args:
        source: of one function; `tl` is Triton's language where it is defined.

    Raises:
        ValueError: its body begins on the line of its head.
    """
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    has_doc = ast.get_docstring(function, clean=False) is not None
    first = function.body[int(has_doc)]
    lines, indent = source.split("\n"), " " * first.col_offset
    if lines[first.lineno - 1][: first.col_offset].strip():
        raise ValueError(f"the body of {function.name} does not begin on a line of its own")
    lines[first.lineno - 1 : first.lineno - 1] = [indent + statement for statement in WAIT]
    return "\n".join(lines)
