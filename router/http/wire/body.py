"""Reads a body: with a deadline, up to a size, counted among all that are read or wait."""

from __future__ import annotations

import asyncio

from aiohttp import web

from router.errors import RequestError
from router.requests.admission import BodyBytes


async def read_body(
    request: web.Request, held: BodyBytes, *, max_bytes: int, timeout_s: float
) -> bytes:
    """The whole body, decompressed where it is compressed.

    Raises:
        RequestError: it is too large, or did not come in time.
        TooManyRequestsError: bodies of all requests take too much memory.
    """

    def too_large() -> RequestError:
        return RequestError(
            f"the body is larger than router.max_body_bytes = {max_bytes}. Fix: send less",
            code="request_too_large",
            status=413,
        )

    if (request.content_length or 0) > max_bytes:
        raise too_large()
    content = request.content
    if content.is_eof():  # all of it came with the headers, as nearly always
        data = content.read_nowait()
        held.add(len(data))
        if len(data) > max_bytes:
            raise too_large()
        return data
    chunks = []
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in content.iter_any():
                held.add(len(chunk))
                if held.num_bytes > max_bytes:
                    raise too_large()
                chunks.append(chunk)
    except TimeoutError as error:
        raise RequestError(
            f"the body did not come within router.body_timeout_s = {timeout_s:g}. "
            f"Fix: send it at once ({held.num_bytes} bytes came)",
            code="timeout",
            status=408,
        ) from error
    return b"".join(chunks)
