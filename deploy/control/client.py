"""The commands' side of operations: calls the controller of a cluster, and hands over its answers.

Importing it loads gRPC. A call that is cut off, or given up with Ctrl-C, ends no operation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from deploy.errors import ClusterError, RefusedError, WrongArgumentError
from deploy.state import ClusterState
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.pb import controller_pb2_grpc
from runtime.rpc.grpc_calls import open_channel

Call = Callable[[Any], Any]
"""From a ``ControllerStub`` to the answers of one of its calls."""

_ERRORS: dict[grpc.StatusCode, type[ClusterError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: WrongArgumentError,
    grpc.StatusCode.FAILED_PRECONDITION: RefusedError,
}


def controller_address(state: ClusterState) -> str:
    """Where the controller takes orders.

    Raises:
        ClusterError: it does not yet.
    """
    if not state.controller_address:
        raise ClusterError(
            f"the controller of {state.name!r} takes no orders while the cluster is "
            f"{state.phase.value}. Fix: wait until it is ready (`tandem status`)"
        )
    return state.controller_address


def follow(
    state: ClusterState, credentials: Credentials, call: Call, take: Callable[[Any], None]
) -> None:
    """Make a call that streams, and hand each of its answers to ``take``.

    Raises:
        WrongArgumentError, RefusedError: the controller says no; nothing was changed.
        ClusterError: it does not answer.
    """

    async def run() -> None:
        async for message in _answers(controller_address(state), credentials, call):
            take(message)

    asyncio.run(run())


async def _answers(address: str, credentials: Credentials, call: Call) -> AsyncIterator[Any]:
    channel = open_channel(address, credentials, Role.CONTROLLER)
    try:
        with asked_of(address):
            async for message in call(controller_pb2_grpc.ControllerStub(channel)):
                yield message
    finally:
        await channel.close(None)


@contextlib.contextmanager
def asked_of(address: str) -> Iterator[None]:
    """Turn the gRPC errors of calls to the controller at ``address`` into ours.

    Raises:
        WrongArgumentError, RefusedError: the controller says no; nothing was changed.
        ClusterError: it does not answer.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        kind = _ERRORS.get(error.code())
        if kind is not None:
            raise kind(error.details() or error.code().name) from error
        raise ClusterError(
            f"the controller at {address} does not answer ({error.code().name}: "
            f"{error.details()}). What it began goes on while it lives: `tandem events`"
        ) from error
