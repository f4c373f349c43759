"""Pages of other origins: answered as browsers ask for it, and only where a setting names them."""

from __future__ import annotations

import aiohttp
import pytest

from router.http.access.cors import ANY
from runtime.config import RouterSection
from runtime.errors import ConfigError
from tests.router.conftest import ANSWER, MODEL, Cluster, StartRouter

PAGE = "https://chat.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100, "stream": True}


async def serving(start_router: StartRouter, origins: str) -> Cluster:
    cluster = await start_router(cors_origins=origins)
    await cluster.add_pair()
    return cluster


@pytest.mark.parametrize("origins", [f"http://localhost:3000, {PAGE}", ANY])
async def test_a_page_that_is_allowed_may_ask_and_read(start_router, origins: str) -> None:
    cluster = await serving(start_router, origins)
    allowed = ANY if origins == ANY else PAGE
    async with aiohttp.ClientSession(cluster.url) as http:
        async with http.options("/v1/chat/completions", headers=PREFLIGHT) as response:
            assert response.status == 204
            assert await response.read() == b""
            assert response.headers["Access-Control-Allow-Origin"] == allowed
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            wanted = PREFLIGHT["Access-Control-Request-Headers"]
            assert response.headers["Access-Control-Allow-Headers"] == wanted
            assert "Access-Control-Allow-Credentials" not in response.headers
        async with http.post("/v1/completions", json=BODY, headers={"Origin": PAGE}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == allowed
            assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        # A page has to be able to read why it was refused, too.
        async with http.post("/v1/completions", json={}, headers={"Origin": PAGE}) as response:
            assert response.status == 400
            assert response.headers["Access-Control-Allow-Origin"] == allowed


async def test_other_pages_are_told_nothing(start_router) -> None:
    cluster = await serving(start_router, PAGE)
    async with aiohttp.ClientSession(cluster.url) as http:
        stranger = {**PREFLIGHT, "Origin": "https://evil.example"}
        async with http.options("/v1/completions", headers=stranger) as response:
            assert response.status == 405
            assert "Access-Control-Allow-Origin" not in response.headers
            assert response.headers["Vary"] == "Origin"
        async with http.options("/v1/completions", headers={"Origin": PAGE}) as response:
            assert response.status == 405  # no preflight
            assert response.headers["Allow"] == "POST"


async def test_by_default_no_page_is_allowed(http, cluster: Cluster) -> None:
    async with http.options("/v1/completions", headers=PREFLIGHT) as response:
        assert response.status == 405
        assert not [name for name in response.headers if name.startswith("Access-Control")]
        assert "Vary" not in response.headers
    async with http.post("/v1/completions", json={**BODY, "stream": False}) as response:
        assert (await response.json())["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize(
    "origins",
    ["chat.example", "https://chat.example/", "https://A.example", "null", "*.example"],
)
def test_what_no_browser_sends_as_an_origin_is_refused(origins: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.cors_origins"):
        RouterSection(cors_origins=f"https://ok.example, {origins}")
