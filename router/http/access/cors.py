"""Lets pages of the origins in ``router.cors_origins`` call this server from a browser.

A browser asks first (an OPTIONS request, the preflight), without the headers of the request that it
is about: it is answered before anything that needs an API key. See the Fetch standard, "CORS
protocol". No credentials are allowed: the API takes no cookies, and the console's stays on its
site.
"""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPMethod

from aiohttp import hdrs, web

ANY = "*"
MAX_AGE_S = 600
"""Browsers ask again after so long."""
_METHODS = "GET, HEAD, POST, OPTIONS"
_EXPOSED = ", ".join(
    (
        *("x-request-id", "x-tandem-ignored-fields", "x-tandem-timings", "x-tandem-routing"),
        *("Retry-After", "x-should-retry"),
        *(f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")),
        *(f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")),
    )
)
"""Headers of answers that scripts may read beside those that they may anyway."""


class CrossOrigin:
    """What browsers are told of one set of origins; with none of them, nothing."""

    def __init__(self, origins: Collection[str]) -> None:
        """``origins`` as browsers write them, or "*" for all."""
        self._origins = frozenset(origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer where ``request`` only asks whether another may be sent, else None."""
        if request.method != HTTPMethod.OPTIONS or not self._allows(request):
            return None
        if hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers:
            return None
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
        }
        if asked:  # any: SDKs send a dozen of their own; a wildcard would leave out Authorization
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked
        return web.Response(status=204, headers=headers)

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell the browser that the page may read ``response``; before its headers are sent."""
        if not self._origins:
            return
        if ANY not in self._origins:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if self._allows(request):
            origin = ANY if ANY in self._origins else request.headers[hdrs.ORIGIN]
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get(hdrs.ORIGIN)
        return origin is not None and not self._origins.isdisjoint((ANY, origin))
