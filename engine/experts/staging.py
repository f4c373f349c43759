"""One expert on its way: packed piece by piece into a box, checked there, and taken out of it.

An expert travels as one run of bytes: its matrices and their scales, then a canary. The canary says
which expert this is, for which slot and in which turn, with a checksum of all before it, all
written by the source; what does not fit is not flipped in. It is packed, fetched and checked in
*pieces*, one a step, so that none of it holds a step up for long. The key idea: weights in slots
change in one place only (`flip`), by copies on the device itself, on the stream of the steps, so
that a step that was launched before runs on the old ones and the next on the new ones.

Boxes are allocated once, before memory is measured for the KV pool.
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
    pieces_of,
    places_of,
    row_factors,
    row_sums,
)
from engine.host_copy import upload
from engine.streams import Streams, StreamUse

PIECE_BYTES: Final = 12 * 2**20
"""Of an expert that are copied, and read for their checksum, beside one step: a quarter of
DeepSeek-V3's 44 MB in FP8. Measured: docs/deep/experts.md."""
_MAGIC: Final = 0x7A6D_6578_7065_7274
_CANARY_BYTES: Final = ROW_BYTES


class Canary(NamedTuple):
    """What travels with an expert: layer (from 0), slot and logical expert, and the turn."""

    turn: int
    layer: int
    slot: int
    expert: int


class Staging:
    """See the module. On a GPU all but `flip` runs on a stream of its own, and nobody waits.

    Attributes:
        nbytes: of a box: an expert's content and its canary.
        num_pieces: in which one is packed, fetched and checked.
        inbox: [nbytes] uint8.
        outbox: [nbytes] uint8; empty where ranks pack into the inboxes of others.
    """

    def __init__(
        self,
        tensors: ExpertTensors,
        streams: Streams,
        *,
        inbox: Tensor | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Allocate.

        Args:
            tensors: of this rank.
            streams: of this rank.
            inbox: [box_bytes(tensors)] uint8 of zeros, where the peers can pack into it; None to
                have one made, and an outbox to send from.
            piece_bytes: of a piece, at most, but for its canary.
        """
        self._tensors, self._device = tensors, streams.device
        self.nbytes = box_bytes(tensors)
        self.outbox: Tensor
        self.inbox: Tensor
        if inbox is None:
            self.outbox, self.inbox = torch.zeros(
                2, self.nbytes, dtype=torch.uint8, device=self._device
            )
        else:
            self.outbox, self.inbox = inbox[:0], inbox
        self._pieces = pieces_of(tensors.sizes, piece_bytes)
        self.num_pieces = len(self._pieces)
        is_cuda = self._device.type == "cuda"
        self._stream = streams.of(StreamUse.EXPERT_COPIES) if is_cuda else None
        self._factors = row_factors(self.inbox[: content_bytes(tensors)])
        # Of every piece: that was packed, and that was checked.
        self._packed_sums, self._checked_sums = torch.zeros(
            2, self.num_pieces, dtype=torch.int64, device=self._device
        )
        self._flipped = self._packed = self._checked = None
        self._fits: Tensor | None = None
        if self._stream is not None:
            self._flipped, self._packed, self._checked = (_new_event() for _ in range(3))

    def bounds(self, piece: int) -> tuple[int, int]:
        """Return where a piece begins and ends in a box; the canary belongs to the last one."""
        each = self._pieces[piece]
        return each.start, self.nbytes if piece == self.num_pieces - 1 else each.end

    def pack(self, piece: int, canary: Canary, slot: int, box: Tensor) -> None:
        """Copy a piece of the expert in a slot into a box, behind the last one its canary.

        Args:
            piece: 0, then the others in order, once the one before `is_packed`.
            canary: of the expert.
            slot: of this rank.
            box: [nbytes] uint8: the inbox or outbox of this rank, or the inbox of a peer.
        """
        with self._beside():
            parts, sums = self._tensors.of(canary.layer, slot), []
            for part in self._pieces[piece].parts:
                source = parts[part.tensor][part.start : part.end]
                box[part.place : part.place + source.nbytes].copy_(source)
                sums.append(row_sums(source))  # not of the box, which may be another GPU's
            self._packed_sums[piece] = checksum_of(torch.cat(sums), self._factors_of(piece))
            if piece == self.num_pieces - 1:
                self._write_canary(box, canary, self._packed_sums.sum())
            _record(self._packed, self._stream)

    def fetch(self, piece: int, canary: Canary, content: Tensor, checksum: int) -> None:
        """Copy a piece of an expert from this host's memory into the inbox, as `pack` does.

        Args:
            piece: see `pack`.
            canary: of the expert that is to come.
            content: [content_bytes] uint8 on the host, pinned where this is a GPU.
            checksum: that its content had when it was stored.
        """
        with self._beside():
            each = self._pieces[piece]
            self.inbox[each.start : each.end].copy_(
                content[each.start : each.end], non_blocking=True
            )
            if piece == self.num_pieces - 1:
                self._write_canary(self.inbox, canary, checksum)
            _record(self._packed, self._stream)

    def is_packed(self) -> bool:
        """Whether what was last to be packed or fetched is in its box."""
        return _is_over(self._packed)

    def check(self, piece: int, canary: Canary) -> None:
        """Read a piece of the inbox, and behind the last one compare with what is expected.

        Args:
            piece: 0, then the others in order, once the one before `is_checked`.
            canary: that is expected.
        """
        with self._beside():
            each = self._pieces[piece]
            sums = row_sums(self.inbox[each.start : each.end])
            self._checked_sums[piece] = checksum_of(sums, self._factors_of(piece))
            if piece == self.num_pieces - 1:
                told = self._canary(self.inbox)
                (words,) = upload([_words(canary)], self._device)
                fits = (told[: len(words)] == words).all()
                fits &= told[len(words)] == self._checked_sums.sum()
                self._fits = fits if self._stream is None else _to_host(fits)
            _record(self._checked, self._stream)

    def is_checked(self) -> bool:
        """Whether what was last to be checked has been read."""
        return _is_over(self._checked)

    def fits(self) -> bool:
        """Whether the expert that was expected is in the inbox, whole; once all `is_checked`."""
        assert self._fits is not None
        return bool(self._fits)

    def flip(self, layer: int, slot: int) -> None:
        """Copy the inbox into a slot of this rank, on the stream of the steps."""
        places = places_of(self.inbox, self._tensors.sizes)
        for place, part in zip(places, self._tensors.of(layer, slot), strict=True):
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

    def _factors_of(self, piece: int) -> Tensor:
        each = self._pieces[piece]
        return self._factors[each.start // ROW_BYTES : each.end // ROW_BYTES]

    def _write_canary(self, box: Tensor, canary: Canary, checksum: Tensor | int) -> None:
        told, words = self._canary(box), _words(canary)
        (written,) = upload([np.append(words, np.int64(0))], self._device)
        written[len(words)] = checksum
        told[: len(written)].copy_(written)

    def _canary(self, box: Tensor) -> Tensor:
        return box[self.nbytes - _CANARY_BYTES :].view(torch.int64)


def box_bytes(tensors: ExpertTensors) -> int:
    """Return the bytes of an outbox or inbox."""
    return content_bytes(tensors) + _CANARY_BYTES


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
