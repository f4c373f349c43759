"""Sessions of browsers: what a sign-in gives back in place of the key, and whose it is later.

A session is a name, an end and a proof over both, which only routers of the cluster can make: every
HTTP process and every router knows it, and none of them keeps it. The proof covers the key's hash
as well, so a session ends with its key. What is kept is those that were signed out, by one router
until their end, in a folder that its processes share.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from pathlib import Path

from router.keys.record import KeyRecord
from router.keys.source import Keyring

SESSION_S = 12 * 3600
"""A working day; then the key is asked for again."""
_LABEL = b"tandem console session"
_ENDED = "console-ended-"
"""The name of an empty file begins so, and ends with the proof of a session that was ended."""


class Sessions:
    """Of the routers that share one secret."""

    def __init__(self, secret: str, clock: Callable[[], float], folder: Path | None = None) -> None:
        """``clock`` is the wall clock: another process may be asked later.

        ``folder`` is shared with other processes; None: there is no other.
        """
        # A key of its own, so that no proof of something else can pass for a session's.
        self._key = hmac.digest(secret.encode(), _LABEL, hashlib.sha256)
        self._clock = clock
        self._folder = folder
        self._ended: dict[str, int] = {}
        """By proof, with its end."""

    def begin(self, record: KeyRecord) -> str:
        """A session of ``record``'s owner, from now on."""
        now = self._clock()
        ends = int(now) + SESSION_S
        if record.expires is not None:
            ends = min(ends, int(record.expires.timestamp()))
        nonce = secrets.token_hex(8)  # two of one second are not one
        return f"{ends}.{nonce}.{record.name}.{self._proof(ends, nonce, record)}"

    def owner(self, session: str, keys: Keyring) -> KeyRecord | None:
        """Whose ``session`` is; None: nobody's, or it is over."""
        end, _, rest = session.partition(".")
        nonce, _, rest = rest.partition(".")
        name, _, proof = rest.partition(".")
        record = keys.by_name.get(name)
        if record is None or not (end.isascii() and end.isdecimal() and len(end) <= 16):
            return None
        wanted = self._proof(int(end), nonce, record)
        is_ours = hmac.compare_digest(proof.encode(errors="replace"), wanted.encode())
        is_over = self._clock() >= int(end) or not is_ours or self._has_ended(wanted)
        return None if is_over else record

    def end(self, session: str, keys: Keyring) -> None:
        """Nobody has ``session`` any more, in any process of this router."""
        if self.owner(session, keys) is None:
            return
        ends, proof = int(session.partition(".")[0]), session.rpartition(".")[2]
        now = self._clock()
        self._ended = {one: until for one, until in self._ended.items() if now < until}
        self._ended[proof] = ends
        if self._folder is not None:
            for path in self._folder.glob(f"{_ENDED}*"):
                if path.stat().st_mtime + SESSION_S < now:
                    path.unlink(missing_ok=True)
            (self._folder / f"{_ENDED}{proof}").touch()

    def _has_ended(self, proof: str) -> bool:
        there = self._folder is not None and (self._folder / f"{_ENDED}{proof}").exists()
        return there or proof in self._ended

    def _proof(self, ends: int, nonce: str, record: KeyRecord) -> str:
        text = f"{ends}.{nonce}.{record.name}.{record.sha256}"
        return hmac.digest(self._key, text.encode(), hashlib.sha256).hex()
