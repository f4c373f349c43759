"""The grammars of one router process: made in a process beside it, and kept.

Nothing is started or imported before the first form comes, unless `warm` was called. What takes too
long, or ends the other process, is refused, and remembered as such: another one is started for what
comes next. Two requests with one form wait for one grammar. One event loop owns all of this and
never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from router.errors import RequestError, TooManyRequestsError
from router.text.grammar.forms import Form
from router.text.grammar.schema_errors import with_fix
from runtime.errors import InternalError
from runtime.logging import get_logger
from runtime.process import dying_with_us

CPU_S = 5.0
"""That one form may take to become a grammar."""
START_S = 120.0
"""That the process may take to be there, and to answer: machines are busy."""
MAX_WAITING = 64
"""Forms that wait for their turn; beyond, a request is answered 429."""
CACHE_BYTES = 64 * 2**20
"""Of grammars that are kept."""
MAX_GRAMMAR_BYTES = 2**20
"""Of one grammar: it travels to the workers with every request."""
_LINE_BYTES = 64 * 2**20

logger = get_logger(__name__)
_Answer = Mapping[str, Any]


class Compilers:
    """Makes grammars of forms."""

    def __init__(self, folder: Path, vocab_size: int, *, cpu_s: float = CPU_S) -> None:
        """``folder`` is the checkpoint's, with its tokenizer."""
        self._arguments = (str(folder), str(vocab_size))
        self._cpu_s = cpu_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._kept: OrderedDict[bytes, _Answer] = OrderedDict()
        self._num_kept_bytes = 0
        self._pending: dict[bytes, asyncio.Task[_Answer]] = {}
        self._warming: asyncio.Task[None] | None = None

    @property
    def num_pending(self) -> int:
        """Forms that become grammars, or wait for it."""
        return len(self._pending)

    @property
    def process_id(self) -> int | None:
        """Of the process beside this one; None: there is none."""
        return None if self._process is None else self._process.pid

    async def compile(
        self, forms: Sequence[Form], *, param: str, is_guarded: bool = False
    ) -> list[str]:
        """The grammar of each of ``forms``, as it travels to workers.

        The first is compiled for the model's vocabulary; the others are the same with a beginning.

        Args:
            forms: what one request asks for.
            param: the field that asks for it.
            is_guarded: a client wrote what they are made of: they are tried out as well.

        Raises:
            RequestError: none can be made; says of which field, and why.
            TooManyRequestsError: too many others wait for theirs.
        """
        formats = [form.format for form in forms]
        asked = {"formats": formats, "cpu_s": self._cpu_s, "is_guarded": is_guarded}
        line = orjson.dumps(asked) + b"\n"
        key = hashlib.blake2b(line).digest()
        answer = self._kept.get(key)
        if answer is None:
            answer = await self._wait_for(key, line)
        else:
            self._kept.move_to_end(key)
        if "grammars" not in answer:
            raise _refusal(answer, forms[0], param)
        grammars: list[str] = answer["grammars"]
        return grammars

    def warm(self) -> None:
        """Start the process now, and return at once; the first form waits if it is not ready."""
        self._warming = asyncio.create_task(self._warm(), name="grammar-process")

    async def close(self) -> None:
        """End the process; who waits is told nothing more."""
        tasks: list[asyncio.Task[Any]] = list(self._pending.values())
        if self._warming is not None:
            tasks.append(self._warming)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end()

    async def _warm(self) -> None:
        async with self._turn:
            try:
                await self._running()
            except InternalError as error:  # the first request is told so, too
                logger.warning("structured output is not ready: %s", error)

    async def _wait_for(self, key: bytes, line: bytes) -> _Answer:
        task = self._pending.get(key)
        if task is None:
            if len(self._pending) >= MAX_WAITING:
                raise TooManyRequestsError(
                    f"{MAX_WAITING} grammars wait to be compiled. Fix: retry in a moment"
                )
            task = asyncio.create_task(self._make(key, line), name="grammar")
            self._pending[key] = task
            task.add_done_callback(lambda _: self._pending.pop(key))
        # Who asked may leave; the next one who asks the same finds it made.
        return await asyncio.shield(task)

    async def _make(self, key: bytes, line: bytes) -> _Answer:
        async with self._turn:
            answer = await self._ask(line)
        size = max((len(text) for text in answer.get("grammars", ())), default=0)
        if size > MAX_GRAMMAR_BYTES:
            answer = {
                "problem": f"becomes a grammar of {size} bytes, and {MAX_GRAMMAR_BYTES} is the "
                "most. Fix: ask for less at once"
            }
        self._keep(key, answer)
        return answer

    def _keep(self, key: bytes, answer: _Answer) -> None:
        self._kept[key] = answer
        self._num_kept_bytes += _size(answer)
        while self._num_kept_bytes > CACHE_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= _size(oldest)

    async def _ask(self, line: bytes) -> _Answer:
        was_there = self._is_there
        answer, status = await self._ask_once(line)
        if answer is None and was_there and status != -signal.SIGPROF:
            # It may have ended before this form came, of which another one can tell.
            answer, status = await self._ask_once(line)
        if answer is not None:
            return answer
        logger.warning("a grammar ended the process that compiles it status=%d", status)
        if status == -signal.SIGPROF:
            return {"problem": f"takes more than {self._cpu_s:g} s to compile. Fix: ask for less"}
        return {"problem": "is too deep or too large to compile. Fix: ask for less"}

    async def _ask_once(self, line: bytes) -> tuple[_Answer | None, int]:
        """(its answer, 0), or None and how the process has ended."""
        process = await self._running()
        assert process.stdin is not None
        try:
            async with asyncio.timeout(START_S):
                process.stdin.write(line)
                with contextlib.suppress(ConnectionError):  # it has ended, and says so by silence
                    await process.stdin.drain()
                answer = await _read(process)
        except BaseException as error:
            await self._end()  # it may answer yet: to somebody else
            if isinstance(error, TimeoutError):
                raise InternalError(
                    f"the process that compiles grammars was silent for {START_S:.0f} s"
                ) from error
            raise
        if answer is not None:
            return answer, 0
        self._process = None
        return None, await process.wait()

    @property
    def _is_there(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        process, problem, status = await self._start()
        if process is None and status < 0:
            # Seen with libraries that crash, rarely, while they are loaded beside others.
            logger.warning("the process that compiles grammars is started again: it %s", problem)
            process, problem, _ = await self._start()
        if process is None:
            raise InternalError(
                f"the process that compiles grammars does not start: it {problem}. Fix: install "
                "tandem with all that it needs (xgrammar), or send no response_format"
            )
        return process

    async def _start(self) -> tuple[asyncio.subprocess.Process | None, str, int]:
        """(the process, "", 0) once it is ready; else None, what it did, and how it ended."""
        module = "router.text.grammar.compile_process"
        self._process = process = await asyncio.create_subprocess_exec(
            *dying_with_us((sys.executable, "-m", module, *self._arguments)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        try:
            async with asyncio.timeout(START_S):
                if await _read(process) is not None:
                    return process, "", 0
                status = await process.wait()
        except TimeoutError:
            await self._end()
            return None, f"was silent for {START_S:.0f} s", 0
        except BaseException:
            await self._end()
            raise
        self._process = None
        return None, f"ended with status {status}", status

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _read(process: asyncio.subprocess.Process) -> _Answer | None:
    """Its next answer; None: it has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        return None
    answer: _Answer = json.loads(line)
    return answer


def _size(answer: _Answer) -> int:
    return 256 + sum(len(text) for text in answer.get("grammars", ()))


def _refusal(answer: _Answer, form: Form, param: str) -> RequestError:
    if "schema" in answer:
        param, _ = form.schemas[answer["schema"]]
    return RequestError(f"{param} {with_fix(answer['problem'])}", param=param)
