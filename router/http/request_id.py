"""By what a request is known in answers and logs."""

from __future__ import annotations

import os
import re

from aiohttp import web

REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)
_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_of(request: web.Request) -> str:
    """The client's x-request-id where it is a plain word, else a new one."""
    given = request.headers.get("x-request-id")
    if given is not None and _VALID_REQUEST_ID.fullmatch(given):
        return given
    return f"req-{os.urandom(12).hex()}"
