"""A headless Chromium, driven by its DevTools protocol over a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

START_S = 60.0
CALL_S = 60.0
_BETWEEN_PAGES = ("navigated or closed", "context was destroyed", "Cannot find context")
"""What an expression fails with whose page is replaced meanwhile."""
KEY_CODES = {
    "Enter": 13,
    "Escape": 27,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def chromium() -> str | None:
    """The path of the program; None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Tab:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session = ""
        self._num_calls = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        """Uncaught exceptions, refusals of the content policy, whatever else stands in red."""
        self._reader = asyncio.create_task(self._read())

    async def open(self) -> None:
        """Make the page."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """One command of the protocol."""
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._num_calls] = answer
        await self._socket.send_json(message)
        async with asyncio.timeout(CALL_S):
            return await answer

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 60.0) -> None:
        """Wait until ``expression`` is true, on this page or on one that takes its place."""
        async with asyncio.timeout(timeout_s):
            while not await self._is_true(expression):
                await asyncio.sleep(0.05)

    async def _is_true(self, expression: str) -> bool:
        try:
            return bool(await self.evaluate(expression))
        except RuntimeError as error:
            if any(between in str(error) for between in _BETWEEN_PAGES):
                return False
            raise

    async def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """The window's size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    async def prefer(self, scheme: str) -> None:
        """The system's theme: dark or light."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def goto(self, url: str) -> None:
        """Open ``url``."""
        await self.call("Page.navigate", url=url)

    async def press(self, key: str) -> None:
        """One key, down and up."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        which: dict[str, object] = {"key": key, "code": key}
        if key in KEY_CODES:
            which["windowsVirtualKeyCode"] = KEY_CODES[key]
        await self.call("Input.dispatchKeyEvent", type="keyDown", **which, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **which)

    async def screenshot(self, path: Path) -> None:
        """What is seen, as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        """Read no more."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for raw in self._socket:
            message = raw.json()
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(RuntimeError(str(message["error"])))
                else:
                    answer.set_result(message["result"])
            elif message["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["level"] == "error":
                    self.complaints.append(f"{entry['text']} {entry.get('url', '')}")


@contextlib.asynccontextmanager
async def open_tab() -> AsyncIterator[tuple[Tab, int]]:
    """A new browser with one page, and the id of its first process."""
    program = chromium()
    assert program is not None
    folder = Path(tempfile.mkdtemp(prefix="tandem-chromium-"))
    words = folder / "stderr"
    with words.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            program,
            *ARGUMENTS,
            f"--user-data-dir={folder / 'profile'}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        async with aiohttp.ClientSession() as http:
            async with asyncio.timeout(START_S):
                address = await _address(process, words)
            socket = await http.ws_connect(address, max_msg_size=0)
            tab = Tab(socket)
            await tab.open()
            try:
                yield tab, process.pid
            finally:
                await tab.close()
                await socket.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _address(process: asyncio.subprocess.Process, words: Path) -> str:
    while True:
        text = words.read_text(errors="replace")
        _, found, rest = text.partition("DevTools listening on ")
        if found and "\n" in rest:
            return rest.split()[0]
        if process.returncode is not None:
            raise RuntimeError(f"Chromium ended before it listened: {text}")
        await asyncio.sleep(0.05)
