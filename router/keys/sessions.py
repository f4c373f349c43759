"""Sessions of browsers: what a sign-in gives back in place of the key, and whose it is later.

A session is a name, an end and a proof over both, which only processes with the cluster's secret
can make: every HTTP process and every router of a cluster knows it, and none of them keeps it. The
proof covers the key's hash as well, so a session ends with its key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from router.keys.record import KeyRecord
from router.keys.source import Keyring

SESSION_S = 12 * 3600
"""A working day; then the key is asked for again."""
_LABEL = b"tandem console session"


class Sessions:
    """Of the routers that share one secret."""

    def __init__(self, secret: str, clock: Callable[[], float]) -> None:
        """``clock`` is the wall clock: another process may be asked later."""
        # A key of its own, so that no proof of something else can pass for a session's.
        self._key = hmac.digest(secret.encode(), _LABEL, hashlib.sha256)
        self._clock = clock

    def begin(self, record: KeyRecord) -> str:
        """A session of ``record``'s owner, from now on."""
        ends = int(self._clock()) + SESSION_S
        return f"{ends}.{record.name}.{self._proof(ends, record)}"

    def owner(self, session: str, keys: Keyring) -> KeyRecord | None:
        """Whose ``session`` is; None: nobody's, or it is over."""
        end, _, rest = session.partition(".")
        name, _, proof = rest.partition(".")
        record = keys.by_name.get(name)
        if record is None or not (end.isascii() and end.isdecimal() and len(end) <= 16):
            return None
        wanted = self._proof(int(end), record).encode()
        is_ours = hmac.compare_digest(proof.encode(errors="replace"), wanted)
        return record if is_ours and self._clock() < int(end) else None

    def _proof(self, ends: int, record: KeyRecord) -> str:
        text = f"{ends}.{record.name}.{record.sha256}"
        return hmac.digest(self._key, text.encode(), hashlib.sha256).hex()
