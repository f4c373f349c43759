"""The CUDA streams of a rank beside the one that its steps run on: who has them, and who ends them.

Made at boot, one object for a rank's process, and handed to whoever works beside the steps; nobody
else makes a stream. Called on the thread that boots and then launches. `of` makes a stream at its
first use and blocks nothing; `close` waits for all of them, after the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, TypeAlias

import torch

from runtime.logging import fields, get_logger

logger = get_logger(__name__)

MakeStream: TypeAlias = Callable[[torch.device, int], Any]
"""Makes a `torch.cuda.Stream` of a device and a priority; another one only in tests."""


class StreamUse(StrEnum):
    """What a stream is for. Work of one use runs in order; uses do not wait for one another."""

    CAPTURE = "capture"
    """Graphs are captured on it while a rank boots; they are replayed on the stream of the steps.
    One for all captures, so that what libraries keep for each stream (workspaces of cuBLAS) is
    there once, and is there before memory is measured for the KV pool."""
    SHARED_EXPERT = "shared-expert"
    """The shared expert, beside routing and travelling tokens (`engine.side_stream`)."""
    KV_COPIES = "kv-copies"
    """KV blocks to and from pinned memory (`engine.memory.pinned_blocks`)."""
    EXPERT_COPIES = "expert-copies"
    """An expert that moves to another slot (`engine.experts.staging`)."""


PRIORITY: Final = 0
"""Of every one of them, as of the stream of the steps: work beside a step takes what that leaves.
CUDA has lower numbers for more urgent work; no other one has been measured."""


def _make_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


class Streams:
    """Side streams of one device, each made when it is first asked for.

    Attributes:
        device: whose they are; any, as long as nobody asks for a stream.
    """

    def __init__(self, device: torch.device, *, make: MakeStream = _make_stream) -> None:
        """Make none yet.

        Args:
            device: of the rank.
            make: see `MakeStream`.
        """
        self.device = device
        self._make = make
        self._streams: dict[StreamUse, torch.cuda.Stream] = {}

    @property
    def uses(self) -> tuple[StreamUse, ...]:
        """For what there are streams, the first one first."""
        return tuple(self._streams)

    def of(self, use: StreamUse) -> torch.cuda.Stream:
        """Return the stream of a use, the same each time."""
        if use not in self._streams:
            self._streams[use] = self._make(self.device, PRIORITY)
        return self._streams[use]

    def close(self) -> None:
        """Wait for all of them and give them back; who keeps one must not use it any more.

        A device that failed is told of, not raised: the step that met it has ended the rank.
        """
        while self._streams:
            use, stream = self._streams.popitem()
            try:
                stream.synchronize()
            except RuntimeError as error:
                logger.warning("the work of a stream did not end %s", fields(use=use, reason=error))
