"""The process that makes grammars, as the router sees it. One event loop owns it, and one form at a
time is asked of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from runtime.errors import InternalError
from runtime.logging import get_logger
from runtime.process import dying_with_us

START_S = 120.0
"""That the process may take to be there, and to answer: machines are busy."""
_LINE_BYTES = 64 * 2**20

logger = get_logger(__name__)
Answer = Mapping[str, Any]


class CompileProcess:
    """Started when it is asked, or before; what ends it is told, and it can be started anew."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """``arguments`` are those of ``compile_process``."""
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """None: it does not run."""
        return self._process.pid if self.is_there and self._process is not None else None

    @property
    def is_there(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Return when it is ready, at once where it is.

        Raises:
            InternalError: it cannot be started.
        """
        if self.is_there:
            return
        is_ready, problem, status = await self._start()
        if not is_ready and status < 0:
            # Seen with libraries that crash, rarely, while they are loaded beside others.
            logger.warning("the process that compiles grammars is started again: it %s", problem)
            is_ready, problem, _ = await self._start()
        if not is_ready:
            raise InternalError(
                f"the process that compiles grammars does not start: it {problem}. Fix: install "
                "tandem with all that it needs (xgrammar), or send no response_format"
            )

    async def ask(self, asked: Mapping[str, Any], cpu_s: float) -> tuple[Answer, float]:
        """What is said of ``asked``, and the seconds of CPU that it took, ``cpu_s`` at most.

        Raises:
            InternalError: it cannot be started, or is silent.
        """
        line = orjson.dumps({**asked, "cpu_s": cpu_s}) + b"\n"
        was_there, began = self.is_there, time.monotonic()
        answer, status = await self._ask_once(line)
        if answer is None and was_there and status != -signal.SIGPROF:
            # It may have ended before this form came, of which another one can tell.
            answer, status = await self._ask_once(line)
        if answer is not None:
            return answer, answer["cpu_s"]
        logger.warning("a grammar ended the process that compiles it status=%d", status)
        if status == -signal.SIGPROF:
            problem = f"takes more than {cpu_s:g} s to compile. Fix: ask for less"
            return {"problem": problem}, cpu_s
        problem = "is too deep or too large to compile. Fix: ask for less"
        return {"problem": problem}, min(cpu_s, time.monotonic() - began)

    async def end(self) -> None:
        """Kill it."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _ask_once(self, line: bytes) -> tuple[Answer | None, int]:
        """(its answer, 0), or None and how the process has ended."""
        await self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            async with asyncio.timeout(START_S):
                process.stdin.write(line)
                with contextlib.suppress(ConnectionError):  # it has ended, and says so by silence
                    await process.stdin.drain()
                answer = await _read(process)
        except BaseException as error:
            await self.end()  # it may answer yet: to somebody else
            if isinstance(error, TimeoutError):
                raise InternalError(
                    f"the process that compiles grammars was silent for {START_S:.0f} s"
                ) from error
            raise
        if answer is not None:
            return answer, 0
        self._process = None
        return None, await process.wait()

    async def _start(self) -> tuple[bool, str, int]:
        """(True, "", 0) once it is ready; else False, what it did, and how it ended."""
        module = "grammar.compile_process"
        self._process = process = await asyncio.create_subprocess_exec(
            *dying_with_us((sys.executable, "-m", module, *self._arguments)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        try:
            async with asyncio.timeout(START_S):
                if await _read(process) is not None:
                    return True, "", 0
                status = await process.wait()
        except TimeoutError:
            await self.end()
            return False, f"was silent for {START_S:.0f} s", 0
        except BaseException:
            await self.end()
            raise
        self._process = None
        return False, f"ended with status {status}", status


async def _read(process: asyncio.subprocess.Process) -> Answer | None:
    """Its next answer; None: it has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        return None
    answer: Answer = json.loads(line)
    return answer
