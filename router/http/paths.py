"""Takes a path that ends with a slash for the same path without one.

Before a request is made of it: whatever looks at paths, the rights of keys too, sees one spelling.
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader


def take_trailing_slashes(server: web.Server) -> None:
    """For all connections that ``server`` accepts from here on."""
    make = server.request_factory

    def make_without_slash(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        path = message.url.raw_path
        if len(path) > 1 and path.endswith("/"):
            url = message.url.with_path(path.rstrip("/") or "/", encoded=True, keep_query=True)
            message = message._replace(path=str(url), url=url)
        return make(message, payload, protocol, writer, task)

    server.request_factory = make_without_slash
