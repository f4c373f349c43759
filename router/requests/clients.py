"""Channels to workers: one per life of a worker, closed when that life is out of the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

import grpc.aio

from router.pool.members import Member, WorkerKey
from runtime.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from runtime.rpc import open_channel

CLOSE_GRACE_S = 5.0

ReserveCall = grpc.aio.UnaryUnaryCall[decode_pb2.ReserveRequest, decode_pb2.ReserveResponse]
FramesCall = grpc.aio.UnaryStreamCall[decode_pb2.FramesRequest, decode_pb2.Frame]
RunCall = grpc.aio.UnaryUnaryCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse]
AbortCall = grpc.aio.UnaryUnaryCall[decode_pb2.AbortRequest, decode_pb2.AbortResponse]


class DecodeStub(Protocol):
    """The calls that the router makes to a decode rank."""

    Reserve: Callable[..., ReserveCall]
    Frames: Callable[..., FramesCall]
    Abort: Callable[..., AbortCall]


class PrefillStub(Protocol):
    """The calls that the router makes to a prefill worker."""

    Run: Callable[..., RunCall]


class WorkerClients:
    """Opens channels when first asked for. One event loop owns it."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._channels: dict[WorkerKey, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def decode(self, member: Member) -> DecodeStub:
        """The stub of a decode rank."""
        stub: DecodeStub = decode_pb2_grpc.DecodeStub(self._channel(member))
        return stub

    def prefill(self, member: Member) -> PrefillStub:
        """The stub of a prefill worker."""
        stub: PrefillStub = prefill_pb2_grpc.PrefillStub(self._channel(member))
        return stub

    def retain(self, keys: Collection[WorkerKey]) -> None:
        """Close the channels of all other workers; calls in flight get a moment to end."""
        for key in self._channels.keys() - set(keys):
            channel = self._channels.pop(key)
            task = asyncio.create_task(channel.close(CLOSE_GRACE_S), name=f"close-channel-{key}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all channels at once."""
        channels = list(self._channels.values())
        self._channels.clear()
        await asyncio.gather(*(channel.close(None) for channel in channels))
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _channel(self, member: Member) -> grpc.aio.Channel:
        channel = self._channels.get(member.key)
        if channel is None:
            channel = open_channel(member.address, self._secret)
            self._channels[member.key] = channel
        return channel
