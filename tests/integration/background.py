"""What goes on beside a test, on a thread of its own, until the test is over."""

from __future__ import annotations

import abc
import threading
from typing import Self

JOIN_S = 120.0


class Background(abc.ABC):
    """Runs from entering to leaving; what it raised is raised on leaving."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run_noted, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)
        if self._failure is not None:
            raise self._failure

    @abc.abstractmethod
    def _run(self) -> None:
        """Go on until `_stop` is set."""

    def _run_noted(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._failure = error
