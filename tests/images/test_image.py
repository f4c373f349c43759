"""The CPU image answers completions as its own user, run by buildah and in the pods of the chart.

`python -m tests.images.build FOLDER` builds it, and ``TANDEM_IMAGE=FOLDER`` says that it is there:
the tests of ``tests/pods`` are then run in it as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from deploy.ports import free_port
from scripts.provenance import manifest_digest
from tests.images.build import CONTAINER, buildah, why_not
from tests.integration.client import complete
from tests.pods.container import IMAGE_USER

BUILT = os.environ.get("TANDEM_IMAGE", "")
REASON = why_not() or ("" if BUILT else "TANDEM_IMAGE names no folder of tests.images.build")
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON or "can be run"),
    pytest.mark.timeout(900),
    pytest.mark.nightly,
]
START_S = 300.0


def inside(*command: str) -> list[str]:
    """A command of the image's user in the image."""
    run = ("run", "--isolation", "chroot", CONTAINER, "--")
    return buildah(Path(BUILT).resolve(), *run, *command)


def said(*command: str) -> str:
    done = subprocess.run(inside(*command), check=True, capture_output=True, text=True, timeout=300)
    return done.stdout.strip()


def test_the_image_runs_as_a_user_that_may_write_nothing_of_it() -> None:
    assert said("id", "-u") == str(IMAGE_USER)
    assert said("sh", "-c", "tandem --version").startswith("tandem")
    writable = "find /opt /usr /etc -writable -not -type l"
    assert said("sh", "-c", f"{writable} 2>/dev/null || true") == ""


def test_the_image_has_its_provenance() -> None:
    archive = Path(BUILT) / "image.tar"
    said = json.loads(archive.with_name("image.tar.provenance.json").read_text(encoding="utf-8"))
    assert said["subject"][0]["digest"] == {"sha256": manifest_digest(archive)}


@pytest.fixture
def url() -> Iterator[str]:
    """Of a cluster that the image's own command starts."""
    port = free_port("127.0.0.1")
    options = ["router.allow_anonymous=true", f"router.port={port}"]
    command = inside("tandem", "up", *(f"--set={option}" for option in options))
    process = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)


def test_the_image_answers_a_completion(url: str) -> None:
    async def ask() -> str:
        deadline = time.monotonic() + START_S
        async with aiohttp.ClientSession(url) as session:
            while not await is_ready(session):
                assert time.monotonic() < deadline, "it did not become ready"
                await asyncio.sleep(0.5)
            options = {"model": "tandem-python", "max_tokens": 8, "temperature": 0}
            answer = await complete(session, "def fibonacci(n):", **options)
            assert (answer.error, answer.status) == (None, 200)
            assert answer.text is not None
            return answer.text

    assert asyncio.run(ask()).strip()


async def is_ready(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/ready") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
