"""One rank's part in a round of moves: what it sends, what it receives, whether that is whole.

An expert comes from a slot of the reader itself, else from its own host memory where that has the
layer, else from a rank that has least to send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from engine.experts.carrier import Carrier
from engine.experts.host_experts import HostExperts
from engine.experts.moves import Move, Round
from engine.experts.staging import Canary, Staging
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
        self._sendings: list[_Sending] = []
        self._sending: _Sending | None = None
        self._is_posted = self._is_asked = False
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
        self._sendings, self._sending, self._incoming = [], None, None
        self._is_asked = False

    def send(self) -> bool:
        """Bring the sendings of this rank on, one after another; whether all are over.

        Raises:
            TandemError: one failed.
        """
        if self._sending is None:
            if not self._sendings:
                return True
            self._sending, self._is_posted = self._sendings.pop(0), False
            self._start(self._sending)
        if not self._staging.is_packed():
            return False
        is_own = self._sending.rank == self._rank
        if not self._is_posted:
            self._is_posted = True
            if self._sending.slot == _HOST:
                self.num_fetched += 1
            elif is_own:
                self._staging.loop_back()
            else:
                self._carrier.send(self._sending.rank)
        if not (self._staging.is_packed() if is_own else self._carrier.is_sent()):
            return False
        self._sending = None
        return not self._sendings

    def _start(self, sending: _Sending) -> None:
        canary = sending.canary
        if sending.slot != _HOST:
            self._staging.start_packing(canary, sending.slot)
            return
        assert self._host is not None
        self._staging.start_fetch(canary, *self._host.get(canary.layer, canary.expert))

    def check(self) -> bool:
        """Whether what came is what was to come; false while that is asked.

        Raises:
            TransferFailedError: it is not.
        """
        move = self._incoming
        if move is None:
            return True
        if not self._is_asked:
            self._is_asked = True
            self._staging.start_check(self._canary_of(move))
        fits = self._staging.check_result()
        if fits is False:
            facts = fields(layer=move.layer, slot=move.slot, expert=move.expert)
            text = f"the canary of an expert that was staged does not fit {facts}"
            raise TransferFailedError(text)
        return fits is True

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
