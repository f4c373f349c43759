"""What a transport tells its users: that something happened, and the notifications of peers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

_MAX_NOTIFICATIONS = 1 << 16
"""Not taken in time, the oldest are dropped: they are hints, the truth is in the memory."""


class EventHub:
    """Listeners and pending notifications. Thread-safe; listeners are called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._notifications: deque[tuple[str, bytes]] = deque(maxlen=_MAX_NOTIFICATIONS)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each event."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``."""
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def tell(self) -> None:
        """Something happened."""
        for listener in self._listeners:
            listener()

    def notified(self, peer: str, message: bytes) -> None:
        """``peer`` sent a notification."""
        self._notifications.append((peer, message))
        self.tell()

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """What arrived since the last call."""
        found = []
        while self._notifications:
            found.append(self._notifications.popleft())
        return found
