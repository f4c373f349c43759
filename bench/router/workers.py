"""A prefill worker and a decode rank that compute nothing, for ``bench.router.request_path``.

They follow the contracts and answer at once: the first token with ``Run``, then one frame a step
with one token of every running request, as a real decode rank sends it. Run it as a process:
``python -m bench.router.workers --control HOST:PORT --model NAME --step-ms 20``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from runtime.net.credentials import Credentials, Listen
from runtime.pb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    registry_pb2,
)
from runtime.rpc.call_server import CallServer, CarriedMethod
from runtime.rpc.grpc_calls import bind_port, create_server
from runtime.rpc.registration import RegistryClient

HOST = "127.0.0.1"
FIRST_TOKEN_ID = 300
NUM_TOKEN_IDS = 3000
"""Outputs walk through so many ids from the first on: ordinary text tokens of the bundled model."""
MAX_QUEUED_FRAMES = 4
NUM_STAMPS = 4


@dataclass(slots=True)
class _Running:
    router_id: str
    row_id: int
    num_tokens: int
    max_tokens: int


class Stamps:
    """When the two calls of each request came and were answered: a line a request, in a file.

    Four moments on the machine's monotonic clock, which all of its processes share.
    """

    def __init__(self, path: Path | None) -> None:
        """None: they are not kept."""
        self._file = None if path is None else path.open("w", encoding="utf-8")
        self._moments: dict[str, list[float]] = {}

    def note(self, request_id: str, came_at: float) -> None:
        """A call that came at ``came_at`` is answered now; a request's second one is its last."""
        if self._file is None:
            return
        moments = self._moments.setdefault(request_id, [])
        moments += came_at, time.monotonic()
        if len(moments) == NUM_STAMPS:
            del self._moments[request_id]
            print(request_id, *moments, file=self._file)

    def flush(self) -> None:
        """Let others read what there is."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Keep nothing more."""
        if self._file is not None:
            self._file.close()


class Workers(decode_pb2_grpc.DecodeServicer, prefill_pb2_grpc.PrefillServicer):
    """Both roles behind one port."""

    def __init__(
        self,
        control: str,
        secret: str,
        model: str,
        step_s: float,
        *,
        max_model_len: int = 4096,
        stamps: Path | None = None,
    ) -> None:
        self._stamps = Stamps(stamps)
        self._max_model_len = max_model_len
        self._control = control
        self._credentials = Credentials.of_secret(secret)
        self._model = model
        self._step_s = step_s
        self._epoch = secrets.randbits(60) + 1
        self._reserved: dict[str, _Running] = {}
        self._running: dict[str, _Running] = {}
        self._streams: dict[str, asyncio.Queue[decode_pb2.Frame]] = {}

    async def serve(self) -> None:
        """Join the router and serve until cancelled."""
        server = create_server(self._credentials)
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)
        calls = CallServer(self._credentials)
        reserve = CarriedMethod(decode_pb2.ReserveRequest.FromString, self.Reserve)
        calls.carry("Decode", Reserve=reserve)
        calls.carry("Prefill", Run=CarriedMethod(prefill_pb2.RunRequest.FromString, self.Run))
        address = f"{HOST}:{bind_port(server, Listen(bind=HOST), self._credentials)}"
        await server.start()
        calls_address = f"{HOST}:{calls.start(Listen(bind=HOST))}"
        leases = [
            RegistryClient(self._control, self._credentials, record, self._load)
            for record in (
                self._record("prefill-0", common_pb2.ROLE_PREFILL, address, calls_address),
                self._record("decode-0", common_pb2.ROLE_DECODE, address, calls_address),
            )
        ]
        await asyncio.gather(*(lease.start() for lease in leases))
        await self._step_forever()

    def _record(
        self, instance: str, role: common_pb2.Role, address: str, calls_address: str
    ) -> registry_pb2.WorkerRecord:
        return registry_pb2.WorkerRecord(
            identity=common_pb2.WorkerIdentity(instance=instance, epoch=self._epoch),
            role=role,
            address=address,
            calls_address=calls_address,
            num_ranks=1,
            model=self._model,
            max_model_len=self._max_model_len,
            layout_fingerprint="bench",
            transport="loopback",
            block_size=64,
        )

    def _load(self) -> registry_pb2.WorkerLoad:
        return registry_pb2.WorkerLoad(num_free_blocks=1000, num_total_blocks=1000)

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: object
    ) -> decode_pb2.ReserveResponse:
        """A place, at once."""
        came_at = time.monotonic()
        self._reserved[request.request_id] = _Running(
            request.router_id,
            request.row_id,
            request.num_output_tokens + 1,
            request.sampling.max_tokens,
        )
        reservation = decode_pb2.Reservation(request_id=request.request_id, nonce=1)
        self._stamps.note(request.request_id, came_at)
        return decode_pb2.ReserveResponse(reservation=reservation)

    async def Run(
        self, request: prefill_pb2.RunRequest, context: object
    ) -> prefill_pb2.RunResponse:
        """The first token, at once; the request is in the next step."""
        came_at = time.monotonic()
        running = self._reserved.pop(request.request_id)
        index = request.num_output_tokens
        first = prefill_pb2.FirstToken(token_id=FIRST_TOKEN_ID + index % NUM_TOKEN_IDS, index=index)
        if running.max_tokens == running.num_tokens:
            first.finish_reason = common_pb2.FINISH_REASON_LENGTH
        else:
            self._running[request.request_id] = running
        self._stamps.note(request.request_id, came_at)
        return prefill_pb2.RunResponse(first_token=first)

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: object
    ) -> decode_pb2.AbortResponse:
        """Forget the request."""
        self._reserved.pop(request.request_id, None)
        known = self._running.pop(request.request_id, None) is not None
        return decode_pb2.AbortResponse(known=known)

    async def Frames(
        self, request: decode_pb2.FramesRequest, context: object
    ) -> AsyncIterator[decode_pb2.Frame]:
        """All frames for one router process."""
        frames: asyncio.Queue[decode_pb2.Frame] = asyncio.Queue(MAX_QUEUED_FRAMES)
        self._streams[request.router_id] = frames
        yield decode_pb2.Frame(decode=common_pb2.WorkerIdentity(epoch=self._epoch))
        while True:
            yield await frames.get()

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time())
            self._stamps.flush()
            for router_id, frame in self._step().items():
                await self._streams[router_id].put(frame)
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _step(self) -> dict[str, decode_pb2.Frame]:
        """One token of every running request, as one frame per router process."""
        frames: dict[str, decode_pb2.Frame] = {}
        for request_id, running in list(self._running.items()):
            frame = frames.setdefault(running.router_id, decode_pb2.Frame())
            index = running.num_tokens
            token_id = FIRST_TOKEN_ID + index % NUM_TOKEN_IDS
            running.num_tokens += 1
            if running.num_tokens == running.max_tokens:
                reason = common_pb2.FINISH_REASON_LENGTH
                frame.deltas.add(
                    request_id=request_id,
                    start_index=index,
                    token_ids=[token_id],
                    finish_reason=reason,
                )
                del self._running[request_id]
            elif running.row_id:
                frame.rows.row_ids.append(running.row_id)
                frame.rows.start_indexes.append(index)
                frame.rows.token_ids.append(token_id)
            else:
                frame.deltas.add(request_id=request_id, start_index=index, token_ids=[token_id])
        return frames


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--stamps", type=Path, help="file for when each request came and went")
    options = parser.parse_args()
    workers = Workers(
        options.control,
        os.environ["TANDEM_SECRET"],
        options.model,
        options.step_ms / 1000,
        max_model_len=options.max_model_len,
        stamps=options.stamps,
    )
    asyncio.run(workers.serve())


if __name__ == "__main__":
    main()
