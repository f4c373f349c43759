"""Turns changes of the router's pool into events, one an instance, however many ranks it has."""

from __future__ import annotations

from dataclasses import dataclass, field

from deploy.control.events import EventKind, EventLog
from deploy.views.pool_watch import PoolMembers


@dataclass(slots=True)
class PoolEvents:
    """Feed it with every view of the pool."""

    events: EventLog
    _lives: dict[str, frozenset[int]] = field(default_factory=dict)
    """Epochs by instance."""
    _draining: set[str] = field(default_factory=set)

    def take(self, members: PoolMembers) -> None:
        """Tell what is new since the last call."""
        lives: dict[str, set[int]] = {}
        draining = set()
        for (name, _), member in members.items():
            lives.setdefault(name, set()).add(member.epoch)
            if member.draining:
                draining.add(name)
        for name in sorted(self._lives.keys() - lives.keys()):
            self.events.add(EventKind.LEFT, "is not in the router's pool any more", instance=name)
        for name, epochs in sorted(lives.items()):
            if not epochs & self._lives.get(name, frozenset()):
                self.events.add(EventKind.JOINED, "joined the router's pool", instance=name)
        for name in sorted(draining - self._draining):
            self.events.add(EventKind.DRAINING, "takes nothing new", instance=name)
        self._lives = {name: frozenset(epochs) for name, epochs in lives.items()}
        self._draining = draining
