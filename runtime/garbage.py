"""Python's garbage collector, kept from looking through what a process has for good.

A full collection looks at every object, some hundred thousand of which are modules, and nothing
else runs meanwhile.
"""

from __future__ import annotations

import gc


def set_aside(*, young_objects: int) -> None:
    """Collect once, and never look through what is left again.

    Args:
        young_objects: so many new ones, and the collector looks for cycles among them.
    """
    gc.set_threshold(young_objects)
    gc.collect()
    gc.freeze()
