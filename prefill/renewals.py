"""Telling decode now and then that tickets' prompts are still being computed.

Decode allows a transfer so much time from its ticket on, and computing is no transfer: until the
last chunk is computed the time begins anew with each of these messages. One message speaks for all
tickets of a decode rank. A call that fails is not repeated: the next comes soon, and decode that
hears of none for the whole time is right to give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prefill.peers import ChannelCache, RankAddress
from runtime.background import BackgroundTasks
from runtime.errors import TandemError
from runtime.logging import fields, get_logger
from runtime.pb import common_pb2, decode_pb2
from runtime.rpc.grpc_calls import map_rpc_errors

MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 5.0
MIN_CALL_TIMEOUT_S = 1.0

logger = get_logger(__name__)


def renewal_interval_s(timeout_s: float) -> float:
    """How often a ticket of so much transfer time is renewed."""
    return min(max(timeout_s / 4, MIN_INTERVAL_S), MAX_INTERVAL_S)


class TicketRenewer:
    """Renews tickets until they are removed. Used on one event loop only."""

    def __init__(
        self,
        identity: common_pb2.WorkerIdentity,
        channels: ChannelCache,
        on_unknown: Callable[[int], None],
    ) -> None:
        """Start with none.

        Args:
            identity: ours; of the first rank.
            channels: to decode.
            on_unknown: told of a nonce that nothing waits for any more.
        """
        self._identity = identity
        self._channels = channels
        self._on_unknown = on_unknown
        self._timeouts: dict[RankAddress, dict[int, float]] = {}  # by nonce
        """Of ranks that a task renews."""
        self._tasks = BackgroundTasks()

    def add(self, decode: RankAddress, nonce: int, timeout_s: float) -> None:
        """Renew a ticket whose transfer may take `timeout_s`."""
        if decode not in self._timeouts:
            self._timeouts[decode] = {}
            self._tasks.start(self._renew(decode), name=f"renew at {decode.address}")
        self._timeouts[decode][nonce] = timeout_s

    def remove(self, decode: RankAddress, nonce: int) -> None:
        """Its prompt is computed, or nobody wants it; one that is not renewed is no error."""
        self._timeouts.get(decode, {}).pop(nonce, None)

    async def close(self) -> None:
        """Renew nothing any more."""
        await self._tasks.close()

    async def _renew(self, decode: RankAddress) -> None:
        try:
            while timeouts := self._timeouts[decode]:
                interval_s = renewal_interval_s(min(timeouts.values()))
                await asyncio.sleep(interval_s)
                if timeouts:
                    await self._try_call(decode, max(interval_s, MIN_CALL_TIMEOUT_S))
        finally:
            del self._timeouts[decode]

    async def _try_call(self, decode: RankAddress, timeout_s: float) -> None:
        """Whatever goes wrong, the next call comes: without it, tickets would end that are good."""
        try:
            await self._call(decode, timeout_s)
        except TandemError as error:
            num = len(self._timeouts[decode])
            logger.warning("tickets were not renewed %s", fields(num=num, why=error.message))
        except Exception:
            logger.exception("a renewal failed %s", fields(decode=decode.address))

    async def _call(self, decode: RankAddress, timeout_s: float) -> None:
        timeouts = self._timeouts[decode]
        request = decode_pb2.RenewTicketsRequest(
            prefill=self._identity, decode_epoch=decode.epoch, nonces=timeouts
        )
        with map_rpc_errors(f"decode at {decode.address}"):
            response: decode_pb2.RenewTicketsResponse = await self._channels.decode_stub(
                decode.address
            ).RenewTickets(request, timeout=timeout_s)
        for nonce in response.unknown:
            if timeouts.pop(nonce, None) is not None:
                self._on_unknown(nonce)
