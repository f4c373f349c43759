"""Child processes of the tests: a decode side and a prefill side that obey commands from a pipe."""

from __future__ import annotations

import hashlib
import multiprocessing
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from kv_transfer.layout import KVLayout
from kv_transfer.ticket import PeerEndpoint, SendTicket
from tests.kv_transfer.helpers import TIMEOUT_S, DecodeSide, Pool, PrefillSide


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How to build the child's decode side."""

    layout: KVLayout
    num_blocks: int
    epoch: int = 0xD1
    transport: str = "loopback"


class Child:
    """A child process; ``call`` runs one of its commands and returns the answer."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=target, args=(theirs, *args))
        self.process.start()
        theirs.close()

    def call(self, *command: object) -> object:
        self.pipe.send(command)
        assert self.pipe.poll(TIMEOUT_S), f"no answer to {command[0]}"
        answer: object = self.pipe.recv()
        return answer

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(TIMEOUT_S)
        self.pipe.close()


def run_decode(pipe: Connection, options: DecodeOptions) -> None:
    """Commands: peer; reserve id blocks nonce; arrival; digest block_ids."""
    side = DecodeSide(
        num_blocks=options.num_blocks,
        epoch=options.epoch,
        layout=options.layout,
        transport=options.transport,
    )
    # Touch the pages now: a first touch costs more than the copy that a test measures.
    side.pool.memory[:] = bytes(len(side.pool.memory))
    while True:
        name, *arguments = pipe.recv()
        match name:
            case "peer":
                pipe.send(side.peer())
            case "reserve":
                request_id, block_ids, nonce = arguments
                pipe.send(side.reserve(request_id, block_ids, nonce=nonce))
            case "arrival":
                arrival = side.arrival()
                side.slots.free(arrival.slot)
                pipe.send(arrival)
            case "digest":
                pipe.send(digest(side.pool, arguments[0]))


def run_prefill(
    pipe: Connection, layout: KVLayout, num_blocks: int, transport: str = "loopback"
) -> None:
    """Commands: send ticket peer blocks (answers at once); report."""
    pool = Pool(num_blocks, layout)
    pool.memory[:] = b"\x5a" * len(pool.memory)
    side = PrefillSide(pool=pool, transport=transport)
    while True:
        name, *arguments = pipe.recv()
        match name:
            case "send":
                side.send(*arguments)
                pipe.send(side.name)
            case "report":
                try:
                    pipe.send(side.report())
                except queue.Empty:
                    pipe.send(None)


def digest(pool: Pool, block_ids: Sequence[int]) -> list[bytes]:
    """A hash of each block."""
    return [hashlib.blake2b(pool.block(block_id)).digest() for block_id in block_ids]


def peer_of(child: Child) -> PeerEndpoint:
    answer = child.call("peer")
    assert isinstance(answer, PeerEndpoint)
    return answer


def reserve_at(child: Child, request_id: str, blocks: Sequence[int], nonce: int) -> SendTicket:
    answer = child.call("reserve", request_id, list(blocks), nonce)
    assert isinstance(answer, SendTicket)
    return answer
