"""The ledger of several HTTP processes: held by the control process, asked over gRPC.

With ``router.http_processes = 1`` nothing of this runs. Several routers count apart from each
other: a key's limits hold at each of them.
"""

from __future__ import annotations

from collections.abc import Awaitable

from router.keys.ledger import Charge, KeyLedger, Ledger, Level, LimitKind, Verdict
from router.keys.record import KeyLimits
from runtime.background import BackgroundTasks
from runtime.errors import TandemError
from runtime.logging import get_logger
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.pb import keys_pb2, keys_pb2_grpc
from runtime.rpc.grpc_calls import map_rpc_errors, open_channel

logger = get_logger(__name__)

TIMEOUT_S = 5.0
"""The control process is on the same machine; a request is refused rather than let in uncounted."""
_KINDS = {
    keys_pb2.KEY_LIMIT_REQUESTS: LimitKind.REQUESTS,
    keys_pb2.KEY_LIMIT_TOKENS: LimitKind.TOKENS,
    keys_pb2.KEY_LIMIT_CONCURRENCY: LimitKind.CONCURRENCY,
}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}


class KeysService(keys_pb2_grpc.KeysServicer):
    """Serves a ``KeyLedger``."""

    def __init__(self, ledger: KeyLedger) -> None:
        self._ledger = ledger

    async def Admit(
        self, request: keys_pb2.AdmitRequest, context: object
    ) -> keys_pb2.AdmitResponse:
        """Take a request and its tokens, or nothing."""
        limits = KeyLimits(
            requests_per_minute=request.requests_per_minute,
            tokens_per_minute=request.tokens_per_minute,
            max_concurrent_requests=request.max_concurrent_requests,
        )
        verdict = self._ledger.decide(_charge_from(request.charge), limits)
        kind = verdict.refused_by
        return keys_pb2.AdmitResponse(
            refused_by=keys_pb2.KEY_LIMIT_UNSPECIFIED if kind is None else _NUMBERS[kind],
            retry_after_s=verdict.retry_after_s,
            requests=_level_to(verdict.requests),
            tokens=_level_to(verdict.tokens),
            num_tokens=verdict.num_tokens,
        )

    async def Spend(
        self, request: keys_pb2.SpendRequest, context: object
    ) -> keys_pb2.SpendResponse:
        """A key has used more."""
        self._ledger.spend(
            request.name, num_tokens=request.num_tokens, num_requests=request.num_requests
        )
        return keys_pb2.SpendResponse()

    async def Settle(
        self, request: keys_pb2.SettleRequest, context: object
    ) -> keys_pb2.SettleResponse:
        """A request has ended."""
        self._ledger.settle(
            *(_charge_from(request.charge), request.num_taken),
            num_tokens=request.num_tokens,
            num_output=request.num_output,
        )
        return keys_pb2.SettleResponse()


class RemoteLedger(Ledger):
    """The ledger of the control process, as an HTTP process sees it. One event loop owns it."""

    def __init__(self, control: str, credentials: Credentials) -> None:
        """``control`` is the control process's gRPC address."""
        self._peer = f"keys {control}"
        self._channel = open_channel(control, credentials, Role.ROUTER)
        self._stub = keys_pb2_grpc.KeysStub(self._channel)
        self._tasks = BackgroundTasks()

    async def admit(self, charge: Charge, limits: KeyLimits) -> Verdict:
        """As ``Ledger`` says.

        Raises:
            TandemError: the control process does not answer.
        """
        request = keys_pb2.AdmitRequest(
            charge=_charge_to(charge),
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            max_concurrent_requests=limits.max_concurrent_requests,
        )
        with map_rpc_errors(self._peer):
            answer = await self._stub.Admit(request, timeout=TIMEOUT_S)
        return Verdict(
            refused_by=_KINDS.get(answer.refused_by),
            retry_after_s=answer.retry_after_s,
            requests=_level_from(answer.requests) if answer.HasField("requests") else None,
            tokens=_level_from(answer.tokens) if answer.HasField("tokens") else None,
            num_tokens=answer.num_tokens,
        )

    def spend(self, name: str, *, num_tokens: int = 0, num_requests: float = 0.0) -> None:
        """As ``Ledger`` says; what cannot be told is logged."""
        request = keys_pb2.SpendRequest(name=name, num_tokens=num_tokens, num_requests=num_requests)
        self._tell(name, self._stub.Spend(request, timeout=TIMEOUT_S))

    def settle(self, charge: Charge, num_taken: int, num_tokens: int, num_output: int) -> None:
        """As ``Ledger`` says; what cannot be told is logged."""
        request = keys_pb2.SettleRequest(
            charge=_charge_to(charge),
            num_taken=num_taken,
            num_tokens=num_tokens,
            num_output=num_output,
        )
        self._tell(charge.name, self._stub.Settle(request, timeout=TIMEOUT_S))

    async def close(self) -> None:
        """Tell what is left, and hang up."""
        await self._tasks.settle()
        await self._channel.close(None)

    def _tell(self, name: str, call: Awaitable[object]) -> None:
        async def tell() -> None:
            try:
                with map_rpc_errors(self._peer):
                    await call
            except TandemError as error:
                logger.warning("the use of a key was not told key=%s error=%r", name, error)

        self._tasks.start(tell(), name=f"use of {name}")


def _charge_to(charge: Charge) -> keys_pb2.KeyCharge:
    return keys_pb2.KeyCharge(
        name=charge.name,
        holder=charge.holder,
        num_tokens=charge.num_tokens,
        num_open=charge.num_open,
    )


def _charge_from(message: keys_pb2.KeyCharge) -> Charge:
    return Charge(
        name=message.name,
        holder=message.holder,
        num_tokens=message.num_tokens,
        num_open=message.num_open,
    )


def _level_to(level: Level | None) -> keys_pb2.BucketLevel | None:
    if level is None:
        return None
    return keys_pb2.BucketLevel(limit=level.limit, remaining=level.remaining, reset_s=level.reset_s)


def _level_from(message: keys_pb2.BucketLevel) -> Level:
    return Level(limit=message.limit, remaining=message.remaining, reset_s=message.reset_s)
