"""When a device ran a step, by events that cost the host microseconds; only `ended_after` waits."""

import torch


class DeviceSpan:
    """From the moment the device came to a step to the moment it had done all of it."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._start.record()

    @classmethod
    def start(cls, device: torch.device) -> "DeviceSpan | None":
        """Begin a span on the current stream; None on a CPU, which is never behind its host."""
        return cls() if device.type == "cuda" else None

    def end(self) -> None:
        """All of the step is issued."""
        self._end.record()

    def seconds(self) -> float:
        """All of the span, which is waited for."""
        self._end.synchronize()
        length_ms: float = self._start.elapsed_time(self._end)
        return length_ms / 1000

    def gap_after(self, before: "DeviceSpan") -> float:
        """Seconds between the end of `before` and our start; both must be over."""
        gap_ms: float = before._end.elapsed_time(self._start)
        return max(gap_ms / 1000, 0.0)

    def ended_after(self, before: "DeviceSpan") -> float:
        """Seconds from the end of `before` to our end, which is waited for.

        A step's results are there a moment before its end, which is issued behind their copies.
        """
        self._end.synchronize()
        distance_ms: float = before._end.elapsed_time(self._end)
        return distance_ms / 1000
