"""Drains an instance: asks all its ranks at once, again and again, until nothing is left of it.

The ranks of a group drain together: one that had drained alone would only be fed dummy steps by the
others. A drained process goes on running, and takes nothing, until it is told to stop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deploy.errors import WrongArgumentError
from deploy.plan import Role
from deploy.views.pool_watch import PoolMembers
from runtime.errors import DeadlineExceededError, TandemError
from runtime.net.credentials import Credentials

if TYPE_CHECKING:
    import grpc.aio

    from runtime.pb.decode_pb2_grpc import DecodeStub
    from runtime.pb.prefill_pb2_grpc import PrefillStub

_ASK_S = 2.0
"""How long a rank may take to answer how much is left; it does so shortly before, or when empty."""
_PAUSE_S = 0.1
SETTLE_S = 10.0
"""After the deadline: for what was given back then to be gone, and KV on its way to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankToDrain:
    """One rank that takes requests."""

    name: str
    role: Role
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What ranks have not finished yet."""

    num_requests: int
    num_tokens: int = 0
    """That decode may still generate, or prefill compute, at most."""

    def __str__(self) -> str:
        tokens = f", at most {self.num_tokens} tokens" if self.num_tokens else ""
        return f"{count_of(self.num_requests)} left{tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOutcome:
    """What became of a drain.

    Attributes:
        num_left: requests by rank, of those that told so last.
        lost: why a rank could not be asked any more, by rank.
    """

    num_left: Mapping[str, int]
    lost: Mapping[str, str]

    def describe(self) -> list[str]:
        """What is wrong, one line each; nothing where it is empty."""
        left = [
            f"{name} still has {count_of(num_left)}"
            for name, num_left in self.num_left.items()
            if num_left and name not in self.lost
        ]
        return [*self.lost.values(), *left]

    @property
    def is_empty(self) -> bool:
        """Whether every rank said that it has nothing left."""
        return not self.lost and not any(self.num_left.values())


def ranks_of(instance: str, members: PoolMembers) -> tuple[RankToDrain, ...]:
    """The ranks of ``instance`` that take requests.

    Raises:
        WrongArgumentError: the pool has no such instance.
    """
    ranks = ranks_in({instance}, members)
    if not ranks:
        names = ", ".join(sorted({name for name, _ in members})) or "none"
        raise WrongArgumentError(
            f"no instance {instance!r} is in the router's pool. Fix: one of those that are: {names}"
        )
    return ranks


def ranks_in(instances: Set[str], members: PoolMembers) -> tuple[RankToDrain, ...]:
    """Those of ``instances`` that take requests; none where they are not in the pool."""
    return tuple(
        RankToDrain(name=f"{name}/{rank}", role=member.role, address=member.address)
        for (name, rank), member in sorted(members.items())
        if name in instances
    )


def is_last_of_its_role(instance: str, members: PoolMembers) -> bool:
    """Whether nobody else takes what ``instance`` gives back."""
    roles = {member.role for (name, _), member in members.items() if name == instance}
    return not any(
        member.role in roles and not member.draining
        for (name, _), member in members.items()
        if name != instance
    )


async def drain_ranks(
    ranks: Sequence[RankToDrain],
    credentials: Credentials,
    *,
    deadline_s: float,
    on_progress: Callable[[Left], None] = lambda left: None,
) -> DrainOutcome:
    """Drain ``ranks``; ``on_progress`` hears what is left in all, when that changes.

    After ``deadline_s`` the ranks give back what has not ended, which the router moves.
    """
    drain = _Drain(credentials, time.monotonic() + deadline_s, on_progress)
    await asyncio.gather(*(drain.follow(rank, len(ranks)) for rank in ranks))
    num_left = {name: left.num_requests for name, left in drain.left.items()}
    return DrainOutcome(num_left=num_left, lost=drain.lost)


@dataclass(slots=True)
class _Drain:
    credentials: Credentials
    until: float
    on_progress: Callable[[Left], None]
    left: dict[str, Left] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    _told: Left | None = None

    async def follow(self, rank: RankToDrain, num_ranks: int) -> None:
        # Imported late: the command line must answer without gRPC.
        from runtime.net.roles import Role as Callee
        from runtime.rpc.grpc_calls import open_channel

        channel = open_channel(rank.address, self.credentials, Callee(rank.role))
        stub = _stub_of(rank.role, channel)
        try:
            while True:
                await self._ask(stub, rank)
                self._tell(num_ranks)
                left = self.left.get(rank.name)
                is_empty = left is not None and left.num_requests == 0
                if is_empty or rank.name in self.lost or time.monotonic() > self.until + SETTLE_S:
                    return
                await asyncio.sleep(_PAUSE_S)
        finally:
            await channel.close(None)

    async def _ask(self, stub: DecodeStub | PrefillStub, rank: RankToDrain) -> None:
        from runtime.pb import common_pb2
        from runtime.rpc.grpc_calls import map_rpc_errors

        request = common_pb2.DrainRequest(deadline_s=max(0.0, self.until - time.monotonic()))
        try:
            with map_rpc_errors(f"{rank.name} at {rank.address}"):
                answer = await stub.Drain(request, timeout=_ASK_S)
            self.left[rank.name] = Left(
                num_requests=answer.num_requests_left, num_tokens=answer.num_tokens_left
            )
            self.lost.pop(rank.name, None)
        except DeadlineExceededError as error:
            # A long step: it will say so another time.
            if time.monotonic() > self.until + SETTLE_S:
                self.lost[rank.name] = error.message
        except TandemError as error:
            self.lost[rank.name] = error.message

    def _tell(self, num_ranks: int) -> None:
        left = Left(
            num_requests=sum(one.num_requests for one in self.left.values()),
            num_tokens=sum(one.num_tokens for one in self.left.values()),
        )
        # A rank may answer first and be lost later: it is counted once.
        if len(self.left.keys() | self.lost.keys()) == num_ranks and left != self._told:
            self._told = left
            self.on_progress(left)


def count_of(num_requests: int) -> str:
    """In words."""
    return "1 request" if num_requests == 1 else f"{num_requests} requests"


def _stub_of(role: Role, channel: grpc.aio.Channel) -> DecodeStub | PrefillStub:
    from runtime.pb import decode_pb2_grpc, prefill_pb2_grpc

    if role is Role.PREFILL:
        return prefill_pb2_grpc.PrefillStub(channel)
    return decode_pb2_grpc.DecodeStub(channel)
