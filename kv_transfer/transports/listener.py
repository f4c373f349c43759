"""The listening socket of a transport, and connections that have not sent their hello.

One thread serves all of them: a stranger costs a file descriptor and a few hundred bytes, never a
thread. So many may wait at once (with TLS their handshake counts as part of their hello); when one
more comes, the oldest is cut off. A peer says its hello as soon as it is connected, so it is never
the oldest for long, and no number of strangers keeps it out. A whole hello has
one limit of time, however its bytes drip.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.transports.hello import (
    Hello,
    HelloReader,
    OtherWireError,
    Status,
    send_reply,
)
from kv_transfer.transports.sockets import ByteSocket, open_listener
from kv_transfer.transports.tls import TlsSocket
from runtime.budget import Budget, BudgetKind
from runtime.logging import get_logger
from runtime.net.credentials import roles_of_peer
from runtime.net.roles import refusal
from runtime.net.sockets import tune

MAX_STRANGERS = 64
HELLO_TIMEOUT_S = 5.0
_MAX_ACCEPTED_AT_ONCE = 16
"""Then those who wait are looked at again: a hello that is here must not be cut off unread."""
_ACCEPT_PAUSE_S = 0.05
_WARNING_PAUSE_S = 60.0

_log = get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Stranger:
    sock: socket.socket
    limit: Budget
    hello: HelloReader = field(default_factory=HelloReader)
    is_shaking_hands: bool = False
    """Its TLS handshake is not over."""


class Listener:
    """Listens at ``host`` from the first moment on; ``close`` is for any thread but its own.

    ``welcome(sock, hello)`` is called on the listener's thread and must not block. It returns why
    the peer is refused, or an empty text when it has taken ``sock`` over, which blocks then.
    """

    def __init__(
        self,
        host: str,
        *,
        name: str,
        welcome: Callable[[ByteSocket, Hello], str],
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self._welcome = welcome
        self._tls = tls
        self._hello_timeout_s = hello_timeout_s
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._num_cut_off = 0
        self._warn_again_at = 0.0
        self._is_closing = False
        self._listener = open_listener(host, port)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_strangers(self) -> int:
        """Connections that have not said a whole hello."""
        return len(self._strangers)

    @property
    def num_cut_off(self) -> int:
        """Strangers so far that were too slow, or too many."""
        return self._num_cut_off

    def close(self) -> None:
        """Stop listening, cut all strangers off, join the thread. Idempotent."""
        self._is_closing = True
        with contextlib.suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        with self._selector:
            while not self._is_closing:
                events = self._selector.select(self._time_to_next())
                # First those who wait: whoever has said its hello cannot be cut off any more.
                for key, _ in events:
                    if key.data is not None:
                        self._read(key.data)
                if any(key.data is None for key, _ in events):
                    self._accept()
                self._cut_off_late()
            for stranger in list(self._strangers.values()):
                self._drop(stranger)

    def _time_to_next(self) -> float | None:
        oldest = next(iter(self._strangers.values()), None)
        return None if oldest is None else oldest.limit.left(time.monotonic())

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._is_closing:
                    return
                # The client was gone before it was accepted, or we are out of file descriptors.
                _log.warning("accept: %s", error)
                time.sleep(_ACCEPT_PAUSE_S)
                return
            self._take_in(sock)

    def _take_in(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if self._tls is not None:
            try:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except (OSError, ValueError) as error:
                _log.debug("a stranger's connection ends: %s", error)
                sock.close()
                return
        limit = Budget.start(BudgetKind.CALL, self._hello_timeout_s, time.monotonic())
        stranger = _Stranger(sock, limit, is_shaking_hands=self._tls is not None)
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        self._strangers[sock] = stranger
        self._read(stranger)
        if len(self._strangers) > MAX_STRANGERS:
            self._cut_off(next(iter(self._strangers.values())))

    def _read(self, stranger: _Stranger) -> None:
        try:
            if stranger.is_shaking_hands and isinstance(stranger.sock, ssl.SSLSocket):
                stranger.sock.do_handshake()
                stranger.is_shaking_hands = False
            hello = stranger.hello.read(stranger.sock)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._selector.modify(stranger.sock, selectors.EVENT_READ, stranger)
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(stranger.sock, selectors.EVENT_WRITE, stranger)
            return
        except OtherWireError as error:
            self._forget(stranger)
            self._refuse(_connection(stranger.sock), "a stranger", str(error))
            return
        except OSError as error:
            _log.debug("a stranger's connection ends: %s", error)
            self._drop(stranger)
            return
        self._forget(stranger)
        self._let_in(stranger.sock, hello)

    def _let_in(self, sock: socket.socket, hello: Hello) -> None:
        connection = _connection(sock)
        try:
            tune(sock)
            connection.settimeout(None)
            reason = _refusal(sock) or self._welcome(connection, hello)
        except OSError as error:
            _log.debug("connection of %r ends: %s", hello.sender, error)
            sock.close()
            return
        except Exception:
            # The listener must outlive it: all other peers come this way.
            _log.exception("cannot serve a connection of %r", hello.sender)
            reason = "this peer cannot serve a connection now"
        if reason:
            self._refuse(connection, hello.sender, reason)

    def _refuse(self, connection: ByteSocket, sender: str, reason: str) -> None:
        _log.warning("refused a connection of %r: %s", sender, reason)
        with contextlib.suppress(OSError):  # whoever it was, it is gone or does not read
            connection.settimeout(0.0)
            send_reply(connection, Status.STALE, reason)
        connection.close()

    def _cut_off_late(self) -> None:
        now = time.monotonic()
        while (oldest := next(iter(self._strangers.values()), None)) and oldest.limit.is_over(now):
            self._cut_off(oldest)

    def _cut_off(self, stranger: _Stranger) -> None:
        self._num_cut_off += 1
        self._drop(stranger)
        now = time.monotonic()
        if now >= self._warn_again_at:
            self._warn_again_at = now + _WARNING_PAUSE_S
            _log.warning(
                "cut off a connection to port %d without a whole hello (%d so far)",
                self.address[1],
                self._num_cut_off,
            )

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock]


def _refusal(sock: socket.socket) -> str:
    """Why the certificate of who connects is not for this; empty: it is, or none is asked for."""
    if not isinstance(sock, ssl.SSLSocket) or sock.context.verify_mode is ssl.CERT_NONE:
        return ""
    return refusal("Kv", "connect", roles_of_peer(sock.getpeercert()))


def _connection(sock: socket.socket) -> ByteSocket:
    return TlsSocket(sock) if isinstance(sock, ssl.SSLSocket) else sock
