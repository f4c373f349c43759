"""Targets: what a peer sends on connections of calls and of KV."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Iterator
from typing import Any, cast

import grpc.aio
from google.protobuf.message import DecodeError

from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.metadata import (
    MetadataRecord,
    SlotLayout,
    decode_record,
    decode_slot_notices,
    encode_record,
)
from kv_transfer.transport import MemoryRegion
from kv_transfer.transports.hello import Hello, HelloReader, receive_reply, send_hello
from kv_transfer.transports.loopback.endpoint import LoopbackEndpoint, RemoteRegion
from kv_transfer.transports.loopback.wire import (
    PostHeader,
    WriteHeader,
    encode_post,
    receive_ack,
    receive_post,
)
from kv_transfer.transports.paired.endpoint import PairedEndpoint
from kv_transfer.transports.paired.frames import FrameKind, Offer, receive_frame, send_frame
from kv_transfer.transports.paired.identity import ProcessIdentity
from kv_transfer.transports.sockets import ByteSocket
from runtime.errors import (
    LayoutMismatchError,
    TransferFailedError,
)
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.pb import (
    calls_pb2,
)
from runtime.rpc.call_connection import CallConnection, greeting, read_greeting
from runtime.rpc.call_server import CallServer, CarriedMethod
from runtime.rpc.call_stream import CallStream, Method
from runtime.sampling import PositionLogprobs
from runtime.trace.context import TraceContext
from tests.fuzz.target import Target

MAX_MESSAGE_BYTES = 1 << 12
CREDENTIALS = Credentials(secret="fuzz")


def cut(data: bytes) -> Iterator[bytes]:
    """Parts of ``data``, each as long as the byte before it says."""
    at = 0
    while at < len(data):
        size = data[at]
        yield data[at + 1 : at + 1 + size]
        at += 1 + size


def parted(*parts: bytes) -> bytes:
    """What `cut` makes ``parts`` of; none is longer than 255 bytes."""
    return b"".join(bytes([len(part)]) + part for part in parts)


class Pipe(asyncio.Transport):
    """A connection whose other end is not there: what is written is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_over = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Of the socket: this stands for it."""
        return self

    def setsockopt(self, *_: int) -> None:
        """Of no effect."""

    def write(self, data: Any) -> None:
        """Keep it."""
        self.written += data

    def is_reading(self) -> bool:
        """Always."""
        return True

    def pause_reading(self) -> None:
        """Of no effect."""

    def close(self) -> None:
        """Note it."""
        self.is_over = True

    abort = close


class Taken:
    """Keeps the messages of a connection."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def opened(self, connection: CallConnection) -> None:
        """See `ConnectionOwner`."""

    def take(self, message: bytes) -> None:
        """See `ConnectionOwner`."""
        self.messages.append(message)

    def writable(self) -> None:
        """See `ConnectionOwner`."""

    def lost(self, reason: str) -> None:
        """See `ConnectionOwner`."""


def _connect(owner: Any) -> tuple[CallConnection, Pipe]:
    connection, pipe = CallConnection(owner, MAX_MESSAGE_BYTES), Pipe()
    connection.connection_made(pipe)
    return connection, pipe


async def _with_loop(work: Any) -> None:
    """Run ``work``; what the loop is told of as a failure is one."""
    failures: list[BaseException] = []

    def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failures.append(context.get("exception") or RuntimeError(context["message"]))

    asyncio.get_running_loop().set_exception_handler(note)
    await work
    if failures:
        raise failures[0]


def call_frames(data: bytes) -> None:
    """The messages of a connection of calls are the same however its bytes are cut."""

    async def read(pieces: list[bytes]) -> list[bytes]:
        owner = Taken()
        connection, pipe = _connect(owner)
        for piece in pieces:
            if not pipe.is_over:
                connection.data_received(piece)
        return owner.messages

    async def work() -> None:
        pieces = list(cut(data))
        messages = await read(pieces)
        assert messages == await read([b"".join(pieces)])
        for message in messages:
            read_greeting(message)

    asyncio.run(_with_loop(work()))


def call_batches(data: bytes) -> None:
    """A server of calls answers each call of a batch once, whatever the batches are."""

    async def echo(request: calls_pb2.CarriedCall, _: Any) -> calls_pb2.CarriedCall:
        if request.number:
            await asyncio.sleep(0)
        return request

    async def work() -> None:
        server = CallServer(CREDENTIALS)
        server.carry(
            "Decode", Abort=CarriedMethod(parse=calls_pb2.CarriedCall.FromString, handler=echo)
        )
        owner, _ = server._welcome(cast(CallConnection, None), frozenset(Role))
        connection, pipe = _connect(owner)
        owner._connection = connection
        num_calls = 0
        for message in cut(data):
            if pipe.is_over:
                break
            try:
                batch = calls_pb2.CallBatch.FromString(message)
                num_calls += sum(bool(call.method) for call in batch.calls)
            except DecodeError:
                num_calls += 0
            owner.take(message)
        await owner.stop(5.0)
        reader = Taken()
        answers, _ = _connect(reader)
        answers.data_received(bytes(pipe.written))
        batches = map(calls_pb2.AnswerBatch.FromString, reader.messages)
        assert sum(len(batch.answers) for batch in batches) <= num_calls

    asyncio.run(_with_loop(work()))


def call_answers(data: bytes) -> None:
    """Answers end calls, with a response or with gRPC's error, and nothing else."""

    async def work() -> None:
        stream = CallStream("127.0.0.1:1", CREDENTIALS)
        connection, pipe = _connect(stream)
        method = Method("Abort", calls_pb2.CarriedCall.FromString, cast(Any, None))
        calls = [stream.start(method, calls_pb2.CarriedCall(number=n)) for n in range(3)]
        stream.take(_ACCEPTED)
        for message in cut(data):
            if not pipe.is_over:
                stream.take(message)
        connection.connection_lost(None)
        for call in calls:
            try:
                await call
            except (grpc.aio.AioRpcError, DecodeError):
                continue

    asyncio.run(_with_loop(work()))


class Bytes:
    """A socket that has so much to read, and takes all that is sent."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.sent = bytearray()

    def recv(self, num_bytes: int) -> bytes:
        """The next bytes; none at the end."""
        found, self.data = self.data[:num_bytes], self.data[num_bytes:]
        return found

    def recv_into(self, view: memoryview, _num_bytes: int = 0, _flags: int = 0, /) -> int:
        """The same, into ``view``."""
        found = self.recv(len(view))
        view[: len(found)] = found
        return len(found)

    def sendall(self, data: bytes) -> None:
        """Keep it."""
        self.sent += data


def _socket(data: bytes = b"") -> tuple[Bytes, ByteSocket]:
    sock = Bytes(data)
    return sock, cast(ByteSocket, sock)


class _Drips(Bytes):
    """One that has a byte at a time, and nothing between two of them."""

    is_dry = False

    def recv(self, num_bytes: int) -> bytes:
        self.is_dry = not self.is_dry
        if self.is_dry:
            raise BlockingIOError
        return super().recv(min(1, num_bytes))


def kv_hello(data: bytes) -> None:
    """A hello is the same in one piece and in drips, and is written as it was read."""
    whole, drips = Bytes(data), _Drips(data)
    try:
        hello: Hello | None = HelloReader().read(cast(Any, whole))
    except OSError:
        hello = None
    reader, again = HelloReader(), None
    for _ in range(2 * len(data) + 4):
        try:
            again = reader.read(cast(Any, drips))
            break
        except BlockingIOError:
            continue
        except OSError:
            break
    assert hello == again
    if hello is not None and "\ufffd" not in hello.sender + hello.receiver:
        sock, out = _socket()
        send_hello(out, hello)
        assert data == bytes(sock.sent) + whole.data


def kv_replies(data: bytes) -> None:
    """What a receiver says to a hello, and then to posts."""
    _, sock = _socket(data)
    receive_reply(sock)
    while True:
        receive_ack(sock)


def kv_posts(data: bytes) -> None:
    """Posts are written as they were read."""
    sock, reader = _socket(data)
    while True:
        before = sock.data
        post = receive_post(reader)
        if post.notify is None or before[16 + 32 * len(post.writes) :][:1] == b"\1":
            assert before == encode_post(post) + sock.data


def kv_frames(data: bytes) -> None:
    """Frames of a paired connection, and what is in them."""
    _, sock = _socket(data)
    while True:
        kind, payload = receive_frame(sock)
        if kind is FrameKind.WHO:
            ProcessIdentity.decode(payload)
        elif kind is FrameKind.OFFER:
            Offer.decode(payload)


def kv_endpoints(data: bytes) -> None:
    """Endpoints of both kinds, and descriptions of a layout."""
    for decode in (LoopbackEndpoint.decode, PairedEndpoint.decode):
        try:
            endpoint: Any = decode(data)
            assert decode(endpoint.encode()) == endpoint
        except TransferFailedError:
            continue
    layout = KVLayout.parse(data.decode(errors="replace"))
    assert KVLayout.parse(layout.describe()) == layout


LAYOUT = KVLayout(
    dtype=KVDtype.BFLOAT16, block_size=4, num_layers=2, num_mtp_layers=1, num_heads=1, head_width=8
)
SLOT = SlotLayout(max_top_logprobs=2, mtp_hidden_bytes=8, max_parts=1)


def kv_records(data: bytes) -> None:
    """A metadata record with the right checksum, and notices."""
    decode_slot_notices(data)
    body = data.ljust(SLOT.flags_offset, b"\0")[: SLOT.flags_offset]
    crc = zlib.crc32(body[44:], zlib.crc32(body[:40]))
    decode_record(body, SLOT)  # refused, but for one in four billion
    record = decode_record(body[:40] + struct.pack("<I", crc) + body[44:], SLOT)
    encode_record(record, SLOT)


def traces(data: bytes) -> None:
    """Headers of a trace are handed on as they were read."""
    header, _, state = data.decode("latin-1").partition("\n")
    found = TraceContext.parse(header, state)
    if found is not None:
        again = TraceContext.parse(found.header, found.state)
        assert again == found


def _message(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _hello(sender: str, receiver: str) -> bytes:
    sock, out = _socket()
    send_hello(out, Hello(3, bytes(range(32)), sender, receiver))
    return bytes(sock.sent)


def _frame_of(kind: FrameKind, payload: bytes) -> bytes:
    sock, out = _socket()
    send_frame(out, kind, payload)
    return bytes(sock.sent)


_ABORT = calls_pb2.CallBatch(
    calls=[
        calls_pb2.CarriedCall(
            number=1,
            method="Abort",
            request=calls_pb2.CarriedCall(number=1).SerializeToString(),
            traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
        ),
        calls_pb2.CarriedCall(number=2, method="Other"),
        calls_pb2.CarriedCall(number=1),
    ]
).SerializeToString()
_ACCEPTED = calls_pb2.AnswerBatch(answers=[calls_pb2.CarriedAnswer()]).SerializeToString()
_MORE = calls_pb2.CallBatch(
    calls=[calls_pb2.CarriedCall(number=3, method="Abort", request=b"")]
).SerializeToString()
_ANSWERS = calls_pb2.AnswerBatch(
    answers=[
        calls_pb2.CarriedAnswer(number=1, response=b"\x08\x01"),
        calls_pb2.CarriedAnswer(number=2, status_code=14, details="no"),
        calls_pb2.CarriedAnswer(status_code=16, details="refused"),
    ]
).SerializeToString()
_ENDPOINT = LoopbackEndpoint("p", "127.0.0.1", 1, 2, b"t" * 32, {"kv": RemoteRegion(b"k" * 16, 64)})
_OFFER = Offer("nixl", b"a", (MemoryRegion("kv", 4096, 64, device=0),))
_POST = encode_post(PostHeader(7, [WriteHeader(b"k" * 16, 0, 8)], b"hi"))
_RECORD = encode_record(
    MetadataRecord(
        nonce=1, epoch=2, first_token=3, logprobs=PositionLogprobs(-1.0, (4,), (-1.0,), 1)
    ),
    SLOT,
)
TARGETS = {
    "call-frames": Target(
        run=call_frames,
        seeds=(parted(_message(greeting("s"))[:5], _message(greeting("s"))[5:] + bytes(4)),),
        words=("tandem wire 1\n",),
    ),
    "call-batches": Target(
        run=call_batches, seeds=(parted(_ABORT, _MORE), parted(_ABORT, _ABORT)), words=("Abort",)
    ),
    "call-answers": Target(run=call_answers, seeds=(parted(_ANSWERS),)),
    "kv-hello": Target(run=kv_hello, seeds=(_hello("prefill-0/0", "decode-0/0") + b"rest",)),
    "kv-replies": Target(
        run=kv_replies,
        refusals=(OSError, ValueError),
        seeds=(b"\0\0\0" + struct.pack("<QBH", 7, 2, 2) + b"no",),
    ),
    "kv-posts": Target(run=kv_posts, refusals=(OSError,), seeds=(_POST + _POST,)),
    "kv-frames": Target(
        run=kv_frames,
        refusals=(OSError,),
        seeds=(
            _frame_of(FrameKind.WHO, ProcessIdentity("b", "n", 1, 2).encode()),
            _frame_of(FrameKind.OFFER, _OFFER.encode()) + _frame_of(FrameKind.BYE, b""),
            _frame_of(
                FrameKind.OFFER, b'{"library":"n","address":"","regions":[["",1e999,1,null,0]]}'
            ),
        ),
    ),
    "kv-endpoints": Target(
        run=kv_endpoints,
        refusals=(LayoutMismatchError,),
        seeds=(
            _ENDPOINT.encode(),
            PairedEndpoint("nixl", "p", "h", 1, 2, "00" * 32).encode(),
            LAYOUT.describe().encode(),
        ),
        is_json=True,
    ),
    "kv-records": Target(
        run=kv_records, refusals=(TransferFailedError,), seeds=(_RECORD, b"\1\0\0\0")
    ),
    "traces": Target(run=traces, seeds=(f"00-{'a' * 32}-{'b' * 16}-01\na=b".encode(),)),
}
