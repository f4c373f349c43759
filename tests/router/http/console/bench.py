"""What the console costs the router and a browser, and the pictures of docs/use/console.md.

``python -m tests.router.http.console.bench [--load] [--shots docs/images]`` starts a router as a
process of its own with 100 registered workers (fake engines) and a headless Chromium. With
``--prefill 1 --decode 1`` the pictures are those of a small cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil

from deploy.ports import free_port
from router.text.tokenizer import Tokenizer
from runtime.config import ClusterConfig, ModelSection, RouterSection
from runtime.config.file import dump_config
from tests.router.conftest import MODEL, write_model
from tests.router.fakes import SECRET
from tests.router.http.console.browser import Tab, open_tab
from tests.router.http.console.crowd import Crowd, ask

NUM_PREFILL, NUM_DECODE = 20, 80


@contextlib.asynccontextmanager
async def serving(num_prefill: int, num_decode: int) -> AsyncIterator[tuple[str, int, Crowd]]:
    """A router process and its workers: its URL, its pid, the crowd."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        write_model(folder / "model")
        ports = [free_port("127.0.0.1"), free_port("127.0.0.1")]
        config = ClusterConfig(
            model=ModelSection(path=str(folder / "model"), name=MODEL),
            router=RouterSection(port=ports[0], control_port=ports[1]),
        )
        (folder / "cluster.toml").write_text(dump_config(config))
        with (folder / "router.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "router", "--config", str(folder / "cluster.toml")],
                env={**os.environ, "TANDEM_SECRET": SECRET},
                stderr=log,
            )
        crowd = Crowd(f"127.0.0.1:{ports[1]}", Tokenizer.from_dir(folder / "model"))
        try:
            await crowd.start(num_prefill, num_decode)
            yield f"http://127.0.0.1:{ports[0]}", process.pid, crowd
        finally:
            await crowd.close()
            process.terminate()
            await asyncio.to_thread(process.wait, 60)


async def wait_served(url: str, num_workers: int) -> None:
    """Until all are in the pool."""
    async with asyncio.timeout(120), aiohttp.ClientSession(url) as http:
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with http.get("/status") as response:
                    if len((await response.json())["workers"]) == num_workers:
                        return
            await asyncio.sleep(0.2)


async def load_forever(url: str) -> None:
    """A few requests at any time."""
    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(_ask_forever(url, number))


async def _ask_forever(url: str, number: int) -> None:
    while True:
        await ask(url, 1, max_tokens=20 + 12 * number)


async def cpu_of(seconds: float, *pids: int) -> float:
    """Per cent of a core that the processes and their descendants take."""

    def total() -> float:
        used = 0.0
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid)
                for process in (parent, *parent.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        times = process.cpu_times()
                        used += times.user + times.system
        return used

    before = total()
    await asyncio.sleep(seconds)
    return round(100 * (total() - before) / seconds, 2)


VIEWS = {
    "console-dark": ("dark", 1280, 940),
    "console-light": ("light", 1280, 940),
    "wide-dark": ("dark", 1920, 1000),
    "phone-dark": ("dark", 390, 844),
}
SMALL_VIEWS = {"small-dark": ("dark", 1280, 1000)}


async def shoot(tab: Tab, url: str, folder: Path, crowd: Crowd) -> None:
    """The pictures of docs/use/console.md: those of a large cluster, or those of a small one."""
    is_large = len(crowd.decodes) > 20
    if is_large:
        crowd.decodes[3].set_draining()
        crowd.decodes[17].fall_silent()
        crowd.decodes[18].fall_silent()
        await asyncio.sleep(8)
    for name, (theme, width, height) in (VIEWS if is_large else SMALL_VIEWS).items():
        await tab.resize(width, height)
        await tab.prefer(theme)
        await tab.goto(f"{url}/console")
        await tab.until("document.querySelectorAll('[data-name]').length > 0")
        await asyncio.sleep(7)
        await tab.screenshot(folder / f"{name}.png")
    if not is_large:
        await tab.press("s")
        await tab.until("document.querySelector('#prompt').open")
        await tab.evaluate("document.querySelector('#prompt-send').click()")
        await tab.until("document.querySelector('#prompt-note').textContent.includes('ended')")
        await tab.screenshot(folder / "prompt-dark.png")


async def main() -> None:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shots", type=Path, help="write pictures into this folder")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--prefill", type=int, default=NUM_PREFILL)
    parser.add_argument("--decode", type=int, default=NUM_DECODE)
    parser.add_argument("--load", action="store_true", help="ask for completions meanwhile")
    parser.add_argument("--table", action="store_true", help="look at the table, not at the grid")
    parser.add_argument("--history", type=float, default=0.0, help="wait so long before")
    options = parser.parse_args()
    async with serving(options.prefill, options.decode) as (url, pid, crowd):
        await wait_served(url, options.prefill + options.decode)
        load = asyncio.create_task(load_forever(url)) if options.load else None
        await asyncio.sleep(10 + options.history)
        measured = {"router_without_viewers": await cpu_of(options.seconds, pid)}
        async with open_tab() as (tab, browser):
            await tab.resize(1280, 940)
            await tab.goto(f"{url}/console")
            await tab.until("document.querySelectorAll('[data-name]').length > 0")
            if options.table:
                await tab.press("g")
            await asyncio.sleep(8)
            both = await asyncio.gather(
                cpu_of(options.seconds, pid), cpu_of(options.seconds, browser)
            )
            measured["router_with_a_viewer"], measured["browser"] = both
            if options.shots:
                await shoot(tab, url, options.shots, crowd)
            measured["complaints"] = tab.complaints
        if load is not None:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
