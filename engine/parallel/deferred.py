"""A transfer whose second half is launched by whoever waits for it.

Unlike `Then`, which continues something that flies by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deferred(Generic[T]):
    """A `Pending` made of the function that finishes it."""

    finish: Callable[[], T]

    def wait(self) -> T:
        """See `Pending`."""
        return self.finish()
