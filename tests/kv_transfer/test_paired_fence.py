"""A fence that meets a handshake: a writer that never had our memory is no suspect.

Without a library: the engines here only count.
"""

from __future__ import annotations

import dataclasses
import socket
import threading

import pytest

from kv_transfer.transports.hello import HelloReader, Status, send_reply
from kv_transfer.transports.paired.endpoint import PairedEndpoint
from kv_transfer.transports.paired.frames import FrameKind, receive_frame, send_frame
from kv_transfer.transports.paired.identity import ProcessIdentity
from kv_transfer.transports.paired.incoming_peer import IncomingPeer
from kv_transfer.transports.paired.transport import PairedTransport
from kv_transfer.transports.sockets import open_listener
from runtime.errors import PeerLostError
from tests.kv_transfer.helpers import HOST


class NoLibrary:
    """A factory that is never asked for an engine."""

    library = "none"
    bypasses_receiver = True


def test_a_writer_that_is_fenced_before_the_offer_says_bye() -> None:
    """The receiver answers WHO with FENCE; the writer's word ends the matter."""
    heard: list[FrameKind] = []
    listener = open_listener(HOST)

    def receiver() -> None:
        sock, _ = listener.accept()
        with sock:
            HelloReader().read(sock)
            send_reply(sock, Status.OK, "")
            receive_frame(sock)  # WHO
            send_frame(sock, FrameKind.FENCE)
            heard.append(receive_frame(sock)[0])

    thread = threading.Thread(target=receiver)
    thread.start()
    writer = PairedTransport(NoLibrary(), "writer", host=HOST)  # type: ignore[arg-type]
    endpoint = PairedEndpoint(
        library="none",
        name="reader",
        host=HOST,
        port=listener.getsockname()[1],
        generation=0,
        token="00" * 32,
    )
    try:
        with pytest.raises(PeerLostError, match="cannot serve"):
            writer.connect("reader", endpoint.encode())
        thread.join(60)
        assert heard == [FrameKind.BYE]
    finally:
        writer.close()
        listener.close()
        thread.join(60)


def test_only_a_peer_that_had_the_offer_may_still_write() -> None:
    us = ProcessIdentity.of_this_process()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = IncomingPeer(ours, "writer", lambda name, message: None)
        assert not peer.may_still_write(us)
        peer.who = dataclasses.replace(us, pid=1)
        assert not peer.may_still_write(us)
        peer.was_offered = True
        assert peer.may_still_write(us)
        send_frame(theirs, FrameKind.BYE)
        peer.read_frames()
        assert not peer.may_still_write(us)
