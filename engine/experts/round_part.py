"""One rank's part in a round of moves: what it sends, what it receives, whether that is whole.

An expert comes from a slot of the reader itself, else from its own host memory where that has the
layer, else from a rank that has least to send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from engine.experts.carrier import Carrier
from engine.experts.host_experts import HostExperts
from engine.experts.staging import Canary, Staging
from experts.moves import Move, Round
from runtime.errors import TransferFailedError
from runtime.logging import fields

_HOST: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sending:
    """One expert that this rank is to send: from which of its slots, and to whom.

    Attributes:
        canary: that travels along.
        slot: of this rank; `_HOST` for its own host's memory.
        rank: that reads it.
    """

    canary: Canary
    slot: int
    rank: int


class RoundPart:
    """`deal`, then `send` until it says yes, `check` until it says yes, and `flip`."""

    def __init__(
        self,
        staging: Staging,
        carrier: Carrier,
        *,
        rank: int,
        share: int,
        host: HostExperts | None = None,
    ) -> None:
        """Have no part yet.

        Args:
            staging: of this rank.
            carrier: between its boxes and those of the others.
            rank: of this process in the group.
            share: slots of a rank.
            host: copies of experts in this rank's host memory, of the same layers on all ranks.
        """
        self._staging, self._carrier, self._host = staging, carrier, host
        self.num_fetched = 0
        """Experts that came from host memory."""
        self._rank, self._share = rank, share
        self._incoming: Move | None = None
        self._sendings: deque[_Sending] = deque()
        # Pieces: of the first sending, that are being packed, and given to the carrier; of what
        # came, that are being checked.
        self._num_begun = self._num_posted = self._num_checked = 0
        self._turn = 0

    def deal(self, moves: Round, *, turn: int) -> None:
        """Find this rank's part in a round; every rank finds the same sources.

        Args:
            moves: of all ranks.
            turn: in which they are sent, for the canaries.
        """
        self.drop()
        self._turn = turn
        loads: dict[int, int] = {}
        for move in moves:
            reader = move.slot // self._share
            if reader == self._rank:
                self._incoming = move
            source = _source_of(move, self._share, loads)
            rank = source // self._share
            if rank != reader and self._host is not None and self._host.has(move.layer):
                if reader == self._rank:
                    canary = self._canary_of(move)
                    self._sendings.append(_Sending(canary=canary, slot=_HOST, rank=reader))
                continue
            loads[rank] = loads.get(rank, 0) + 1
            if rank == self._rank:
                local = source - rank * self._share
                sending = _Sending(canary=self._canary_of(move), slot=local, rank=reader)
                self._sendings.append(sending)

    def drop(self) -> None:
        """Have no part any more; what was posted is the carrier's to give up."""
        self._sendings, self._incoming = deque(), None
        self._num_begun = self._num_posted = self._num_checked = 0

    def send(self) -> bool:
        """Bring the sendings of this rank on by a piece, one after another; whether all are over.

        Raises:
            TandemError: one failed.
        """
        if not self._sendings:
            return True
        if not (self._staging.is_packed() and self._carrier.is_sent()):
            return False
        sending = self._sendings[0]
        if self._num_posted < self._num_begun:
            if sending.rank != self._rank:
                self._carrier.send(sending.rank, *self._staging.bounds(self._num_posted))
            self._num_posted += 1
        if self._num_begun < self._staging.num_pieces:
            self._begin(sending, self._num_begun)
            self._num_begun += 1
            return False
        if not self._carrier.is_sent():
            return False
        self.num_fetched += sending.slot == _HOST
        self._sendings.popleft()
        self._num_begun = self._num_posted = 0
        return not self._sendings

    def _begin(self, sending: _Sending, piece: int) -> None:
        canary = sending.canary
        if sending.slot == _HOST:
            assert self._host is not None
            content, checksum = self._host.get(canary.layer, canary.expert)
            self._staging.fetch(piece, canary, content, checksum)
            return
        is_own = sending.rank == self._rank
        box = self._staging.inbox if is_own else self._carrier.box(sending.rank)
        self._staging.pack(piece, canary, sending.slot, box)

    def check(self) -> bool:
        """Look at another piece of what came; whether all of it is what was to come.

        Raises:
            TransferFailedError: it is not.
        """
        move = self._incoming
        if move is None:
            return True
        if not self._staging.is_checked():
            return False
        if self._num_checked < self._staging.num_pieces:
            self._staging.check(self._num_checked, self._canary_of(move))
            self._num_checked += 1
            return False
        if not self._staging.fits():
            facts = fields(layer=move.layer, slot=move.slot, expert=move.expert)
            text = f"the canary of an expert that was staged does not fit {facts}"
            raise TransferFailedError(text)
        return True

    def flip(self) -> int:
        """Copy what came into its slot, for the next step; how many bytes these were."""
        move, self._incoming = self._incoming, None
        if move is None:
            return 0
        self._staging.flip(move.layer, move.slot - self._rank * self._share)
        return self._staging.nbytes

    def _canary_of(self, move: Move) -> Canary:
        return Canary(turn=self._turn, layer=move.layer, slot=move.slot, expert=move.expert)


def _source_of(move: Move, share: int, loads: Mapping[int, int]) -> int:
    """Return the slot to copy from: of the reader itself, else of a rank that has least to send."""
    reader = move.slot // share
    return min(
        move.sources,
        key=lambda slot: (slot // share != reader, loads.get(slot // share, 0), slot),
    )
