"""The work of a step as a chain of operations that can stand aside for another one.

Layers are generators: a bare `yield` says "what I have launched may fly while somebody else
launches work". Run alone, a chain never notices its yields; interleaved, the collectives of one
micro-batch are covered by the GEMMs of the other. The key idea: serial and overlapped execution
are the same code, and the schedule is one number.
"""

from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Operations: TypeAlias = Generator[None, None, T]
"""Work that yields where it may be overtaken, and returns its result."""


def do_nothing() -> None:
    """What is done between two operations unless somebody asks for more."""


def run(operations: Operations[T], meanwhile: Callable[[], None] = do_nothing) -> T:
    """Run one chain from its beginning to its end; call `meanwhile` at each yield."""
    while True:
        try:
            next(operations)
        except StopIteration as stop:
            result: T = stop.value
            return result
        meanwhile()


def interleave(
    first: Operations[T],
    second: Operations[T],
    *,
    lag: int,
    meanwhile: Callable[[], None] = do_nothing,
) -> tuple[T, T]:
    """Run two chains in turns, from yield to yield, the first ahead by `lag` yields.

    The first is never behind the second: between two equal chains, whatever the first does before
    its n-th yield has been launched when the second begins what leads to its own n-th yield.
    `meanwhile` is called at each yield.
    """
    assert lag >= 0, lag
    results: dict[int, T] = {}
    for _ in range(lag):
        _advance(first, 0, results)
        meanwhile()
    while len(results) < 2:
        _advance(first, 0, results)
        meanwhile()
        _advance(second, 1, results)
        meanwhile()
    return results[0], results[1]


def _advance(operations: Operations[T], index: int, results: dict[int, T]) -> None:
    if index in results:
        return
    try:
        next(operations)
    except StopIteration as stop:
        results[index] = stop.value
