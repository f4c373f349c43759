"""What each path asks for, where there are API keys.

A path that is not named here needs a key for inference: an endpoint that is new is closed until it
is named open. The same holds for every path at which there is nothing.
"""

from __future__ import annotations

from router.keys.record import Right

CONSOLE = "/console"
SESSION_PATH = f"{CONSOLE}/session"
"""Where a browser shows its key, once; and `END_PATH` where it gives the session back."""
END_PATH = f"{CONSOLE}/end"

OPEN = frozenset({"/", "/health", "/ready", CONSOLE, SESSION_PATH, END_PATH})
"""For whoever asks: probes, a redirect, and the page, which asks for the key itself."""
_RIGHTS = {
    "/metrics": Right.METRICS,
    "/targets": Right.METRICS,
    "/status": Right.OPERATIONS,
    "/ranks": Right.OPERATIONS,
    "/experts": Right.OPERATIONS,
    f"{CONSOLE}/data": Right.OPERATIONS,
    f"{CONSOLE}/experts": Right.OPERATIONS,
}


def right_for(path: str, *, metrics_are_open: bool) -> Right | None:
    """What a key must be good for to be let in at ``path``; None: no key is needed."""
    right = _RIGHTS.get(path, Right.INFERENCE)
    is_open = path in OPEN or (right is Right.METRICS and metrics_are_open)
    return None if is_open else right


def is_for_clients(path: str) -> bool:
    """Whether ``path`` is of the API, and not for who runs or watches the cluster."""
    return right_for(path, metrics_are_open=False) is Right.INFERENCE and not path.startswith(
        CONSOLE
    )
