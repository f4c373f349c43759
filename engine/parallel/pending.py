"""Results that are on their way: what a collective returns so that other work can be launched.

The key idea: starting and waiting are two calls, and what lies between them flies at the same time.
On a GPU `wait` does not stop the host: it makes the current stream wait.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
S = TypeVar("S")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A result on its way. Its inputs stay alive and unchanged until `wait` has returned."""

    def wait(self) -> T_co:
        """Return the result; call once.

        On a GPU the current stream waits for it, and the host goes on. On a CPU the host waits.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ready(Generic[T]):
    """A result that is there."""

    value: T

    def wait(self) -> T:
        """Return it."""
        return self.value


def wait_for(pending: Pending[T] | None) -> T | None:
    """Return the result of what may be nothing."""
    return None if pending is None else pending.wait()


@dataclass(frozen=True, slots=True)
class Then(Generic[S, T]):
    """A result to which a function is applied after its arrival."""

    pending: Pending[S]
    function: Callable[[S], T]

    def wait(self) -> T:
        """Wait, then apply."""
        return self.function(self.pending.wait())


@dataclass(frozen=True, slots=True)
class Deferred(Generic[T]):
    """A result that is made by whoever waits for it, unlike one that flies by itself."""

    finish: Callable[[], T]

    def wait(self) -> T:
        """Make it."""
        return self.finish()
