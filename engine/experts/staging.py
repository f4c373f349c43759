"""One expert on its way: a rank's outbox and inbox, and how it comes out of slots and into them.

An expert travels as one run of bytes: a canary, then its matrices and their scales. The canary says
which expert this is, for which slot and in which turn, with a checksum of all that follows, all
written by the source; what does not fit is not flipped in. The key idea: weights in slots change in
one place only (`flip`), by copies on the device itself, on the stream of the steps, so that a step
that was launched before runs on the old ones and the next on the new ones.

Outbox and inbox are allocated once, before memory is measured for the KV pool.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.experts.expert_tensors import (
    ROW_BYTES,
    ExpertTensors,
    checksum_of,
    content_bytes,
    places_of,
    row_factors,
)
from engine.host_copy import upload
from engine.streams import Streams, StreamUse

_MAGIC: Final = 0x7A6D_6578_7065_7274
_HEADER_BYTES: Final = ROW_BYTES


class Canary(NamedTuple):
    """What travels with an expert: layer (from 0), slot and logical expert, and the turn."""

    turn: int
    layer: int
    slot: int
    expert: int


class Staging:
    """See the module. On a GPU all but `flip` runs on a stream of its own, and nobody waits.

    Attributes:
        nbytes: of an outbox or inbox.
        outbox: uint8.
        inbox: uint8.
    """

    def __init__(
        self,
        tensors: ExpertTensors,
        streams: Streams,
        *,
        boxes: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Allocate.

        Args:
            tensors: of this rank.
            streams: of this rank.
            boxes: outbox and inbox, [box_bytes(tensors)] uint8, where peers have to reach them.
        """
        self._tensors, self._device = tensors, streams.device
        self.nbytes = box_bytes(tensors)
        if boxes is None:
            outbox, inbox = torch.zeros(2, self.nbytes, dtype=torch.uint8, device=streams.device)
            boxes = outbox, inbox
        self.outbox, self.inbox = boxes
        is_cuda = streams.device.type == "cuda"
        self._stream = streams.of(StreamUse.EXPERT_COPIES) if is_cuda else None
        self._factors = row_factors(self.inbox[_HEADER_BYTES:])
        self._flipped = self._packed = self._checked = None
        self._fits: Tensor | None = None
        if self._stream is not None:
            self._flipped, self._packed, self._checked = (_new_event() for _ in range(3))

    def start_packing(self, canary: Canary, slot: int) -> None:
        """Copy the expert in a slot of this rank into the outbox, behind its canary."""
        with self._beside():
            for place, part in zip(
                self._places(self.outbox), self._tensors.of(canary.layer, slot), strict=True
            ):
                place.copy_(part)
            header = _header(self.outbox)
            (words,) = upload([_words(canary)], self._device)
            header[: len(words)].copy_(words)
            header[len(words)].copy_(self._sum(self.outbox))
            _record(self._packed, self._stream)

    def is_packed(self) -> bool:
        """Whether the outbox is whole."""
        return _is_over(self._packed)

    def loop_back(self) -> None:
        """Take what was packed for a slot of this rank itself."""
        with self._beside():
            self.inbox.copy_(self.outbox)
            _record(self._packed, self._stream)

    def start_fetch(self, canary: Canary, content: Tensor, checksum: int) -> None:
        """Copy an expert from this host's memory into the inbox, behind its canary.

        Args:
            canary: of the expert that is to come.
            content: [content_bytes] uint8 on the host, pinned where this is a GPU.
            checksum: that its content had when it was stored.
        """
        with self._beside():
            self.inbox[_HEADER_BYTES:].copy_(content, non_blocking=True)
            words = np.append(_words(canary), np.int64(checksum))
            (told,) = upload([words], self._device)
            _header(self.inbox)[: len(told)].copy_(told)
            _record(self._packed, self._stream)

    def start_check(self, canary: Canary) -> None:
        """Compare the inbox with what is expected, and its content with its checksum."""
        with self._beside():
            header = _header(self.inbox)
            (words,) = upload([_words(canary)], self._device)
            fits = (header[: len(words)] == words).all()
            fits &= header[len(words)] == self._sum(self.inbox)
            self._fits = fits if self._stream is None else _to_host(fits)
            _record(self._checked, self._stream)

    def check_result(self) -> bool | None:
        """Whether the expert that was expected is in the inbox, whole; None while that is asked."""
        if self._fits is None or not _is_over(self._checked):
            return None
        return bool(self._fits)

    def flip(self, layer: int, slot: int) -> None:
        """Copy the inbox into a slot of this rank, on the stream of the steps."""
        for place, part in zip(
            self._places(self.inbox), self._tensors.of(layer, slot), strict=True
        ):
            part.copy_(place)

    def end_flip(self) -> None:
        """All changes of this flip are launched: what packs or fills an inbox has to wait."""
        if self._flipped is not None:
            self._flipped.record()

    def is_flipped(self) -> bool:
        """Whether the inbox is free."""
        return _is_over(self._flipped)

    def _beside(self) -> AbstractContextManager[object]:
        """Return what work beside the steps runs in, behind the latest flip."""
        if self._stream is None:
            return nullcontext()
        assert self._flipped is not None
        self._stream.wait_event(self._flipped)
        return torch.cuda.stream(self._stream)

    def _places(self, box: Tensor) -> list[Tensor]:
        return places_of(box[_HEADER_BYTES:], self._tensors.sizes)

    def _sum(self, box: Tensor) -> Tensor:
        return checksum_of(box[_HEADER_BYTES:], self._factors)


def box_bytes(tensors: ExpertTensors) -> int:
    """Return the bytes of an outbox or inbox."""
    return _HEADER_BYTES + content_bytes(tensors)


def _header(box: Tensor) -> Tensor:
    return box[:_HEADER_BYTES].view(torch.int64)


def _words(canary: Canary) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([_MAGIC, *canary], dtype=np.int64)


def _to_host(flag: Tensor) -> Tensor:
    host = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True)
    return host.copy_(flag, non_blocking=True)


def _record(event: torch.cuda.Event | None, stream: torch.cuda.Stream | None) -> None:
    if event is not None:
        event.record(stream)


def _is_over(event: torch.cuda.Event | None) -> bool:
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
