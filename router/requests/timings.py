"""Where the time of one choice went: moments that are kept anyway, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.pb import common_pb2


@dataclass(slots=True)
class RequestTimings:
    """Moments of one choice on the monotonic clock, and what workers measured, in seconds.

    That is the event loop's clock too, but uvloop's stands still within a turn, counts whole
    milliseconds, and is asked only where a millisecond does not matter.
    """

    received: float
    reserve_sent: float = 0.0
    reserved: float = 0.0
    """When decode's answer was read from the wire."""
    run_sent: float = 0.0
    prefilled: float = 0.0
    """When prefill's answer was."""
    first_token: float = 0.0
    last_token: float = 0.0
    """When the latest was handed over."""
    ended: float = 0.0
    num_migrations: int = 0
    migration_s: float = 0.0
    """From losses of workers to the next tokens, in all."""
    attempt_started: float = 0.0
    """The latest one."""
    lost: float = 0.0
    """Since when the choice is without workers; 0: it has them."""
    mask_cpu_s: float = 0.0
    """CPU that workers have used to follow the output by the client's grammar, in all attempts."""
    worker: dict[str, float] = field(default_factory=dict)

    def merge(self, timings: common_pb2.Timings) -> None:
        """Keep what ``timings`` says; a field that nobody filled is left out."""
        self.worker.update({item.name: value for item, value in timings.ListFields()})

    def migrated(self, now: float) -> float:
        """The next token after a loss is there; returns how long it took."""
        seconds, self.lost = now - self.lost, 0.0
        self.migration_s += seconds
        return seconds

    def split(self) -> dict[str, float]:
        """Seconds per stage, those known.

        ``router_s`` is all before the first call to a worker, ``in_router_s`` all of ``ttft_s``
        that this process took itself: it had what it waited for.
        """
        own_s = self.reserve_sent - self.received + self.run_sent - self.reserved
        own_s += self.first_token - self.prefilled
        stages = {
            "router_s": self.reserve_sent - self.received,
            "reserve_s": self.run_sent - self.reserve_sent,
            "in_router_s": own_s if self.prefilled else -1.0,
            "ttft_s": self.first_token - self.received,
            "total_s": self.ended - self.received,
            "num_migrations": float(self.num_migrations),
            "migration_s": self.migration_s,
        }
        known = {name: value for name, value in stages.items() if value >= 0.0}
        known.update(self.worker)
        if self.mask_cpu_s:
            known["mask_cpu_s"] = self.mask_cpu_s
        return known

    def told(self) -> dict[str, float]:
        """The same for people: to the microsecond."""
        return {name: round(value, 6) for name, value in self.split().items()}
