"""Who may look at a router that has keys: `/status`, `/metrics`, the console and its session."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from deploy.views.cluster import _fetch_status
from router.http.access.gate import SESSION_COOKIE
from router.keys.file import add_to_file, remove_from_file
from router.keys.record import KeyRecord, Right, hash_key, new_key
from router.keys.source import KEYS_VARIABLE
from runtime.net.credentials import Credentials
from tests.router.conftest import Cluster, StartRouter
from tests.router.fakes import SECRET

OPERATIONS = ("/status", "/status/", "/console/data", "/console")
RECORDINGS = ("/experts", "/console/experts")
"""Which nobody can make of no workers: 409 for who may."""
METRICS = ("/metrics", "/targets", "/metrics/")
BROWSER = {"Accept": "text/html,*/*;q=0.8"}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def add(path: Path, name: str, *rights: Right) -> str:
    key = new_key()
    record = KeyRecord(name=name, sha256=hash_key(key), rights=frozenset(rights))
    add_to_file(path, record)
    return key


async def statuses(cluster: Cluster, paths: tuple[str, ...], key: str) -> set[int]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found = set()
    async with aiohttp.ClientSession(cluster.url, headers=headers) as http:
        for path in paths:
            async with http.get(path) as response:
                found.add(response.status)
    return found


async def test_each_right_opens_its_own_paths(start_router: StartRouter, keys_file: Path) -> None:
    user, scraper, operator, everything = (
        add(keys_file, "user", Right.INFERENCE),
        add(keys_file, "scraper", Right.METRICS),
        add(keys_file, "operator", Right.OPERATIONS),
        add(keys_file, "everything", *Right),
    )
    cluster = await start_router(keys_file=str(keys_file), metrics_access="key")
    api = ("/v1/models",)
    expected = {
        "": (401, 401, 401),
        "sk-of-nobody": (401, 401, 401),
        user: (200, 403, 403),
        scraper: (403, 200, 403),
        operator: (403, 200, 200),
        everything: (200, 200, 200),
        SECRET: (401, 200, 200),
    }
    for key, (of_api, of_metrics, of_operations) in expected.items():
        assert await statuses(cluster, api, key) == {of_api}
        assert await statuses(cluster, METRICS, key) == {of_metrics}
        # The page itself asks for a key, whatever came.
        assert await statuses(cluster, OPERATIONS[:3], key) == {of_operations}
        may_record = 409 if of_operations == 200 else of_operations
        assert await statuses(cluster, RECORDINGS, key) == {may_record}
        wanted = 200 if of_operations == 200 else 401
        assert await statuses(cluster, OPERATIONS[3:], key) == {wanted}
        assert await statuses(cluster, ("/health",), key) == {200}


async def test_tandem_itself_asks_with_the_secret(
    start_router: StartRouter, keys_file: Path
) -> None:
    add(keys_file, "user", Right.INFERENCE)
    cluster = await start_router(keys_file=str(keys_file))
    for secret, is_told in ((SECRET, True), ("another", False)):
        credentials = Credentials.of_secret(secret)
        status = await asyncio.to_thread(_fetch_status, f"{cluster.url}/v1", credentials)
        assert bool(status.get("model")) is is_told


async def test_a_browser_signs_in_once_and_no_script_sees_the_session(
    start_router: StartRouter, keys_file: Path
) -> None:
    user, operator = (
        add(keys_file, "user", Right.INFERENCE),
        add(keys_file, "operator", Right.OPERATIONS),
    )
    cluster = await start_router(keys_file=str(keys_file))
    jar = aiohttp.CookieJar(unsafe=True)  # of an address, not a name
    async with aiohttp.ClientSession(cluster.url, cookie_jar=jar, headers=BROWSER) as http:
        async with http.get("/") as response:
            assert (response.status, response.url.path) == (401, "/console")
            page = await response.text()
            policy = response.headers["Content-Security-Policy"]
            assert response.headers["Cache-Control"] == "no-store"
        assert '<form method="post" action="/console/session">' in page
        assert "script-src 'none'" in policy
        assert "form-action 'self'" in policy
        for wrong in (user, "sk-of-nobody", "", SECRET, "x" * 5000):
            async with http.post("/console/session", data={"key": wrong}) as response:
                assert response.status == 401
                assert "not known here" in await response.text()
        assert len(jar) == 0
        form = {"key": f" {operator} "}
        async with http.post("/console/session", data=form, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (303, "/console")
            cookie = response.headers["Set-Cookie"]
        for attribute in ("HttpOnly", "SameSite=Strict", "Path=/console", "Max-Age=43200"):
            assert attribute in cookie
        assert "Secure" not in cookie  # plain text here; with TLS it is there
        assert operator not in cookie
        assert hash_key(operator) not in cookie
        async with http.get("/console") as response:
            assert response.status == 200
            assert "Sign out" in await response.text()
        async with http.get("/console/data") as response:
            assert response.status == 200
        async with http.get("/console/experts") as response:
            assert response.status == 409, "let in, and there is no worker"
        # A session is for the console alone.
        (morsel,) = jar
        sent = {"Cookie": f"{SESSION_COOKIE}={morsel.value}"}
        async with http.get("/experts", headers=sent) as response:
            assert response.status == 401
        async with http.get("/status", headers=sent) as response:
            assert response.status == 401
        async with http.get("/v1/models", headers=sent) as response:
            assert response.status == 401
        async with http.post("/console/end", allow_redirects=False) as response:
            assert response.status == 303
        assert len(jar) == 0
        async with http.get("/console/data") as response:
            assert response.status == 401


async def test_a_copy_of_a_session_is_worth_nothing_when_it_was_signed_out(
    start_router: StartRouter, keys_file: Path
) -> None:
    operator = add(keys_file, "operator", Right.OPERATIONS)
    cluster = await start_router(keys_file=str(keys_file))
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(cluster.url, cookie_jar=jar) as http:
        async with http.post("/console/session", data={"key": operator}):
            pass
        (morsel,) = jar
        stream = {"Accept": "text/event-stream"}
        async with http.get("/console/data", headers=stream) as response:
            await response.content.readuntil(b"event: snapshot")
            async with http.post("/console/end", allow_redirects=False) as ended:
                assert ended.status == 303
            await response.read()  # the open page's stream ends
        copy = {"Cookie": f"{SESSION_COOKIE}={morsel.value}"}
        async with http.get("/console/data", headers=copy) as response:
            assert response.status == 401
        async with http.post("/console/session", data={"key": operator}):
            pass
        async with http.get("/console/data") as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({}, True),  # no browser
        ({"Origin": "OWN"}, True),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "https://llm.example", "X-Forwarded-Host": "llm.example"}, True),
        ({"Origin": "https://evil.example", "X-Forwarded-Host": "llm.example"}, False),
        ({"Origin": "https://llm.example", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": "OWN", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
    ],
)
async def test_the_forms_of_the_console_take_nothing_from_another_site(
    start_router: StartRouter, keys_file: Path, headers: dict[str, str], is_own: bool
) -> None:
    operator = add(keys_file, "operator", Right.OPERATIONS)
    cluster = await start_router(keys_file=str(keys_file))
    sent = {name: value.replace("OWN", cluster.url) for name, value in headers.items()}
    async with aiohttp.ClientSession(cluster.url, headers=sent) as http:
        for path in ("/console/session", "/console/end"):
            form = {"key": operator}
            async with http.post(path, data=form, allow_redirects=False) as response:
                assert response.status == (303 if is_own else 403)
                if not is_own:
                    assert "Set-Cookie" not in response.headers
                    assert "Fix: the form of /console itself" in await response.text()


async def test_a_key_that_has_expired_opens_nothing_and_says_so(
    start_router: StartRouter, keys_file: Path
) -> None:
    for name, right in (("user", Right.INFERENCE), ("operator", Right.OPERATIONS)):
        add(keys_file, name, right)
    late = "expires = 2020-01-31T12:00:00+01:00\n"
    keys = {}
    for name, right in (("old", Right.INFERENCE), ("former", Right.OPERATIONS)):
        keys[name] = add(keys_file, name, right)
        keys_file.write_text(keys_file.read_text() + late)
    cluster = await start_router(keys_file=str(keys_file))
    async with aiohttp.ClientSession(cluster.url) as http:
        for name, path in (("old", "/v1/models"), ("former", "/status")):
            sent = {"Authorization": f"Bearer {keys[name]}"}
            async with http.get(path, headers=sent) as response:
                assert response.status == 401
                told = f"the API key '{name}' expired at 2020-01-31T11:00:00Z. Fix: "
                assert told in await response.text()
        async with http.post("/console/session", data={"key": keys["former"]}) as response:
            assert response.status == 401
            assert "This key has expired." in await response.text()
        async with http.get("/metrics") as response:
            text = await response.text()
        assert 'pd_router_key_requests_total{key="old",outcome="expired"} 1.0' in text


async def test_a_gateway_that_ends_tls_gets_a_cookie_for_tls_only(
    start_router: StartRouter, keys_file: Path
) -> None:
    operator = add(keys_file, "operator", Right.OPERATIONS)
    cluster = await start_router(keys_file=str(keys_file))
    headers = {"X-Forwarded-Proto": "https"}
    async with (
        aiohttp.ClientSession(cluster.url, headers=headers) as http,
        http.post("/console/session", data={"key": operator}, allow_redirects=False) as response,
    ):
        assert "Secure" in response.headers["Set-Cookie"]


async def test_a_stream_ends_with_the_key_of_its_session(
    start_router: StartRouter, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.rpc.renewal.CHECK_S", 0.0)
    operator = add(keys_file, "operator", Right.OPERATIONS)
    cluster = await start_router(keys_file=str(keys_file))
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(cluster.url, cookie_jar=jar) as http:
        async with http.post("/console/session", data={"key": operator}):
            pass
        stream = {"Accept": "text/event-stream"}
        async with http.get("/console/data", headers=stream) as response:
            assert response.status == 200
            await response.content.readuntil(b"event: snapshot")
            remove_from_file(keys_file, "operator")
            await response.read()  # to its end
        async with http.get("/console/data") as response:
            assert response.status == 401


async def test_the_environment_names_an_operator_too(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "0123456789abcdef0123"
    monkeypatch.setenv(KEYS_VARIABLE, f"ops:operations={key}, bob=abcdef0123456789abcd")
    cluster = await start_router()
    assert await statuses(cluster, OPERATIONS, key) == {200}
    assert await statuses(cluster, ("/v1/models",), key) == {403}
    assert await statuses(cluster, OPERATIONS[:2], "abcdef0123456789abcd") == {403}


async def test_without_keys_there_is_nothing_to_sign_in_to(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(cluster.url) as http:
        async with http.get("/console") as response:
            assert response.status == 200
            assert "Sign out" not in await response.text()
        form = {"key": "whatever"}
        async with http.post("/console/session", data=form, allow_redirects=False) as response:
            assert response.status == 303
            assert "Set-Cookie" not in response.headers
