"""Channels to workers: one per life of a worker, closed when that life is out of the pool.

A lease that ran out is not a death: calls under way end by themselves, and the channel is closed
behind the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

import grpc.aio

from router.pool.members import Member, WorkerKey
from runtime.background import BackgroundTasks
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.pb import (
    cache_pb2,
    cache_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from runtime.rpc.call_stream import CallStream, Method, StreamCall
from runtime.rpc.grpc_calls import open_channel

FramesCall = grpc.aio.UnaryStreamCall[decode_pb2.FramesRequest, decode_pb2.Frame]
FollowCall = grpc.aio.UnaryStreamCall[cache_pb2.FollowRequest, cache_pb2.CacheFrame]
AbortCall = grpc.aio.UnaryUnaryCall[decode_pb2.AbortRequest, decode_pb2.AbortResponse]


class Call(Protocol):
    """What any call of gRPC can do."""

    def add_done_callback(self, callback: Callable[[object], None], /) -> None:
        """Call ``callback`` when the call has ended, however it did."""


P = ParamSpec("P")
C = TypeVar("C", bound=Call)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStub:
    """The calls that the router makes to a decode rank."""

    Reserve: Callable[..., StreamCall[decode_pb2.ReserveResponse]]
    Frames: Callable[..., FramesCall]
    Abort: Callable[..., AbortCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStub:
    """The calls that the router makes to a prefill worker."""

    Run: Callable[..., StreamCall[prefill_pb2.RunResponse]]


class _Line:
    """A channel, its stubs, and the number of calls on it."""

    def __init__(
        self, channel: grpc.aio.Channel, calls: CallStream, on_idle: Callable[[], None]
    ) -> None:
        """``on_idle`` is called when the last of the calls has ended."""
        self._channel = channel
        self.num_calls = 0
        self._on_idle = on_idle
        self._calls = calls
        decode = decode_pb2_grpc.DecodeStub(channel)
        reserve = Method("Reserve", decode_pb2.ReserveResponse.FromString, decode.Reserve)
        self.decode = DecodeStub(
            Reserve=self._counted(partial(self._calls.start, reserve)),
            Frames=self._counted(decode.Frames),
            Abort=self._counted(decode.Abort),
        )
        prefill = prefill_pb2_grpc.PrefillStub(channel)
        run = Method("Run", prefill_pb2.RunResponse.FromString, prefill.Run)
        self.prefill = PrefillStub(Run=self._counted(partial(self._calls.start, run)))
        # Not counted: it is open for as long as the worker is in the pool.
        self.follow: Callable[..., FollowCall] = cache_pb2_grpc.CacheStub(channel).Follow

    async def close(self) -> None:
        """End what is under way, and the connection."""
        await self._calls.close()
        await self._channel.close(None)

    def _counted(self, call: Callable[P, C]) -> Callable[P, C]:
        """``call``, such that it counts from its start to its end."""

        def start(*args: P.args, **kwargs: P.kwargs) -> C:
            started = call(*args, **kwargs)
            self.num_calls += 1
            started.add_done_callback(self._ended)
            return started

        return start

    def _ended(self, _: object) -> None:
        self.num_calls -= 1
        if self.num_calls == 0:
            self._on_idle()


class WorkerClients:
    """Opens channels when first asked for. One event loop owns it."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._lines: dict[WorkerKey, _Line] = {}
        self._leaving: set[WorkerKey] = set()
        """To be closed when their last call has ended, unless they come back before."""
        self._closing = BackgroundTasks()

    @property
    def num_channels(self) -> int:
        """Open ones."""
        return len(self._lines)

    def decode(self, member: Member) -> DecodeStub:
        """The stub of a decode rank."""
        return self._line(member).decode

    def prefill(self, member: Member) -> PrefillStub:
        """The stub of a prefill worker."""
        return self._line(member).prefill

    def cache(self, member: Member) -> Callable[[cache_pb2.FollowRequest], FollowCall]:
        """The call that follows a worker's prefix cache; on the channel of that moment."""
        return lambda request: self._line(member).follow(request)

    def retain(self, keys: Collection[WorkerKey]) -> None:
        """Close the channels of all other workers, each when no call is on it any more."""
        self._leaving = self._lines.keys() - set(keys)
        for key in list(self._leaving):
            self._close_if_idle(key)

    async def close(self) -> None:
        """Close all channels at once."""
        lines = list(self._lines.values())
        self._lines.clear()
        await asyncio.gather(*(line.close() for line in lines))
        await self._closing.close()

    def _line(self, member: Member) -> _Line:
        key = member.key
        line = self._lines.get(key)
        if line is None:
            role = Role(member.role.value)
            channel = open_channel(member.address, self._credentials, role)
            calls = CallStream(member.calls_address, self._credentials, role)
            line = self._lines[key] = _Line(channel, calls, lambda: self._close_if_idle(key))
        return line

    def _close_if_idle(self, key: WorkerKey) -> None:
        line = self._lines.get(key)
        if line is None or line.num_calls or key not in self._leaving:
            return
        del self._lines[key]
        self._leaving.discard(key)
        self._closing.start(line.close(), name=f"close-channel-{key}")
