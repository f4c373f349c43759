"""Logs of processes on other hosts, which the controller reads there: a ``LogSource``.

Importing it loads gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio

from deploy.control.client import asked_of, controller_address
from deploy.state import ClusterState
from deploy.views.log_reader import MAX_CHUNK_BYTES, LogChunk, whole_lines
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.pb import controller_pb2, controller_pb2_grpc
from runtime.rpc.grpc_calls import open_channel

_FIRST_TAIL_BYTES = 64 << 10
_MAX_TAIL_BYTES = 16 << 20


class RemoteLogs:
    """Asks for every piece over one connection. Blocking, with an event loop of its own."""

    def __init__(self, state: ClusterState, credentials: Credentials, names: Sequence[str]) -> None:
        """The logs of the processes ``names``; connects when first asked."""
        self._state = state
        self._credentials = credentials
        self._names = tuple(names)
        self._runner = asyncio.Runner()
        self._channel: grpc.aio.Channel | None = None

    def names(self) -> Sequence[str]:
        """The processes whose logs are elsewhere."""
        return self._names

    def tail(self, name: str, num_lines: int) -> LogChunk:
        """The last lines of a process's log.

        Raises:
            ClusterError: the controller, or the process's host, does not answer.
        """
        num_bytes = _FIRST_TAIL_BYTES
        while True:
            piece = self._read(name, -num_bytes, num_bytes)
            is_enough = piece.data.count(b"\n") > num_lines or num_bytes >= _MAX_TAIL_BYTES
            if is_enough or piece.offset == 0:
                break
            num_bytes *= 4
        lines, num_whole = whole_lines(piece.data)
        last = lines[-num_lines:] if num_lines else ()
        return LogChunk(lines=last, position=piece.offset + num_whole)

    def read(self, name: str, position: int) -> LogChunk:
        """The complete lines from ``position`` on.

        Raises:
            ClusterError: the controller, or the process's host, does not answer.
        """
        piece = self._read(name, position, MAX_CHUNK_BYTES)
        if piece.offset < position:
            return LogChunk(lines=(), position=0)  # a new life has begun it anew
        lines, num_whole = whole_lines(piece.data)
        return LogChunk(lines=lines, position=position + num_whole)

    def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            self._runner.run(self._channel.close(None))
        self._runner.close()

    def _read(self, name: str, offset: int, num_bytes: int) -> controller_pb2.ReadLogResponse:
        request = controller_pb2.ReadLogRequest(process=name, offset=offset, max_bytes=num_bytes)
        return self._runner.run(self._ask(request))

    async def _ask(self, request: controller_pb2.ReadLogRequest) -> controller_pb2.ReadLogResponse:
        address = controller_address(self._state)
        if self._channel is None:
            self._channel = open_channel(address, self._credentials, Role.CONTROLLER)
        with asked_of(address):
            answer: controller_pb2.ReadLogResponse = await controller_pb2_grpc.ControllerStub(
                self._channel
            ).ReadLog(request)
        return answer
