"""How a browser gets to see the console where there are keys: by a key, shown once in a form.

It gets a session for it, in a cookie that no script reads and that goes to no other site and to no
other path. The key itself is in no address, no storage and no log.
"""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs

from aiohttp import web

from router.errors import ForbiddenError
from router.http.access.access import CONSOLE, END_PATH, SESSION_PATH
from router.http.access.gate import EXPIRED, SESSION_COOKIE, Gate
from router.http.console.page import Page, load_sign_in
from router.keys.sessions import SESSION_S

MAX_FORM_BYTES = 4096
FORM_S = 10.0
_PROBLEM = "This key is not known here, or has not the right <em>operations</em>."
_EXPIRED = "This key has expired."


class SignIn:
    """Handlers of one HTTP process."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._page = load_sign_in()
        self._refusal = load_sign_in(_PROBLEM)
        self._expired = load_sign_in(_EXPIRED)

    def routes(self) -> list[web.RouteDef]:
        """For the application."""
        return [web.post(SESSION_PATH, self.begin), web.post(END_PATH, self.end)]

    def page(self) -> web.Response:
        """The form."""
        return _answer(self._page)

    async def begin(self, request: web.Request) -> web.Response:
        """``POST /console/session``: the key of the form becomes a session."""
        check_origin(request)
        if not self._gate.asks_for_keys:
            return _to_console()
        session, problem = self._gate.sign_in(await _key_in_form(request))
        if problem:
            return _answer(self._expired if problem == EXPIRED else self._refusal)
        response = _to_console()
        # A gateway that ends TLS says so; who lies here gets a cookie that is worth less to them.
        is_secure = request.secure or request.headers.get("X-Forwarded-Proto") == "https"
        response.set_cookie(
            *(SESSION_COOKIE, session),
            path=CONSOLE,
            max_age=SESSION_S,
            httponly=True,
            samesite="Strict",
            secure=is_secure,
        )
        return response

    async def end(self, request: web.Request) -> web.Response:
        """``POST /console/end``: the session ends, also for who has a copy of it."""
        check_origin(request)
        self._gate.sign_out(request)
        response = _to_console()
        response.del_cookie(SESSION_COOKIE, path=CONSOLE, httponly=True, samesite="Strict")
        return response


def check_origin(request: web.Request) -> None:
    """Refuse what a page of another site has a browser send, before its body is read.

    Browsers say where a form comes from: Fetch metadata, which no gateway changes and which goes to
    addresses that they trust only, else Origin. What is no browser says neither.

    Raises:
        ForbiddenError: another site's page sent it.
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    # A page cannot make a browser send this one.
    hosts = {request.host, request.headers.get("X-Forwarded-Host", request.host)}
    is_own = site in ("same-origin", "none") if site is not None else True
    if site is None and origin is not None:
        is_own = origin.partition("://")[2] in hosts
    if not is_own:
        raise ForbiddenError(
            f"{request.path}: sent by a page of {origin or 'another site'}, and this is "
            f"{request.host}. Fix: the form of {CONSOLE} itself; a gateway must hand on Host, or "
            "say it in X-Forwarded-Host",
            param=None,
            code="foreign_origin",
        )


async def _key_in_form(request: web.Request) -> str:
    """The field ``key``; "" where the body is none of our form's, or does not come."""
    try:
        async with asyncio.timeout(FORM_S):
            body = b""
            while len(body) <= MAX_FORM_BYTES:
                part = await request.content.read(MAX_FORM_BYTES + 1 - len(body))
                if not part:
                    break
                body += part
        fields = parse_qs(body.decode("ascii"), max_num_fields=4)
    except (TimeoutError, ValueError):
        return ""
    return fields.get("key", [""])[0].strip() if len(body) <= MAX_FORM_BYTES else ""


def _answer(page: Page) -> web.Response:
    return web.Response(body=page.body, status=401, headers=page.headers)


def _to_console() -> web.Response:
    return web.Response(status=303, headers={"Location": CONSOLE, "Cache-Control": "no-store"})
