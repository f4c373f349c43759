"""The grammars of one router process: made in processes beside it, and kept.

Nothing is started or imported before the first form comes, unless `warm` was called. What takes too
long, or ends its process, is refused, and remembered as such. Two requests of a tenant with one
form wait for one grammar. One event loop owns all of this and never waits.

Tenants take turns by the seconds of CPU that their forms have had. There are two processes; the
second is started when forms wait for the first, and one that was ended is started again at once.
Until it is ready it counts as held by the tenant whose form ended it. With keys a tenant holds one
process at most, so whatever forms one sends, the other process is there for everybody else.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from grammar.schemas.schema_errors import with_fix
from router.errors import RequestError, TooManyRequestsError
from router.keys.line import WaitingLine
from router.text.grammar.forms import Form
from router.text.grammar.process import Answer, CompileProcess
from router.text.lanes import Payer
from runtime.background import BackgroundTasks
from runtime.errors import InternalError
from runtime.logging import get_logger
from runtime.tiers import NO_TIER, Standing

CPU_S = 5.0
"""That one form may take to become a grammar."""
NUM_PROCESSES = 2
MAX_WAITING = 64
"""Forms that become grammars or wait for it, half of them of one tenant; beyond, a request is
answered 429."""
CACHE_BYTES = 64 * 2**20
"""Of grammars that are kept."""
MAX_GRAMMAR_BYTES = 2**20
"""Of one grammar: it travels to the workers with every request."""

logger = get_logger(__name__)


class _Turn:
    """One form that waits for a process."""

    num_choices = 0  # what it costs is known when it is a grammar

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self.process: asyncio.Future[CompileProcess] = asyncio.get_running_loop().create_future()


class Compilers:
    """Makes grammars of forms."""

    def __init__(self, folder: Path, vocab_size: int, *, cpu_s: float = CPU_S) -> None:
        """``folder`` is the checkpoint's, with its tokenizer."""
        arguments = (str(folder), str(vocab_size))
        self._cpu_s = cpu_s
        self._processes = [CompileProcess(arguments) for _ in range(NUM_PROCESSES)]
        self._idle: list[CompileProcess] = []
        """Those that were started, and compile nothing; the last is asked first."""
        self._off = self._processes[::-1]
        """Those that nobody has started yet."""
        self._line = WaitingLine[_Turn]()
        self._held: Counter[str] = Counter()
        """Processes by the tenant whose form they compile, or were ended by."""
        self._kept: OrderedDict[bytes, Answer] = OrderedDict()
        self._num_kept_bytes = 0
        self._pending: dict[tuple[str, bytes], asyncio.Task[Answer]] = {}
        """By tenant, too: nobody stands in the line of another who has asked for the same."""
        self._starting = BackgroundTasks()
        self._num_starting = 0

    @property
    def num_pending(self) -> int:
        """Forms that become grammars, or wait for it."""
        return len(self._pending)

    @property
    def process_ids(self) -> list[int]:
        """Of the processes beside this one."""
        return [each.pid for each in self._processes if each.pid is not None]

    async def compile(
        self,
        forms: Sequence[Form],
        *,
        param: str,
        is_guarded: bool = False,
        payer: Payer | None = None,
    ) -> list[str]:
        """The grammar of each of ``forms``, as it travels to workers.

        The first is compiled for the model's vocabulary; the others are the same with a beginning.

        Args:
            forms: what one request asks for.
            param: the field that asks for it.
            is_guarded: a client wrote what they are made of: they are tried out as well.
            payer: who asks, and pays where nothing of it is kept.

        Raises:
            RequestError: none can be made; says of which field, and why.
            TooManyRequestsError: too many others wait for theirs.
        """
        formats = [form.format for form in forms]
        asked = {"formats": formats, "is_guarded": is_guarded}
        key = hashlib.blake2b(orjson.dumps(asked)).digest()
        answer = self._kept.get(key)
        if answer is None:
            answer = await self._wait_for(key, asked, payer)
        else:
            self._kept.move_to_end(key)
        if "grammars" not in answer:
            raise _refusal(answer, forms[0], param)
        grammars: list[str] = answer["grammars"]
        return grammars

    def warm(self) -> None:
        """Start a process now, and return at once; the first form waits if it is not ready."""
        self._start_one()

    async def close(self) -> None:
        """End the processes; who waits is told nothing more."""
        tasks = list(self._pending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._starting.close()
        for process in self._processes:
            await process.end()

    async def _wait_for(self, key: bytes, asked: Mapping[str, Any], payer: Payer | None) -> Answer:
        own = (NO_TIER if payer is None else payer.standing).tenant, key
        task = self._pending.get(own)
        if task is None:
            self._check_room(own[0])
            task = asyncio.create_task(self._make(key, asked, payer), name="grammar")
            self._pending[own] = task
            task.add_done_callback(lambda _: self._pending.pop(own))
        # Who asked may leave; the next one who asks the same finds it made.
        return await asyncio.shield(task)

    def _check_room(self, tenant: str) -> None:
        num_own = sum(owner == tenant for owner, _ in self._pending)
        if len(self._pending) >= MAX_WAITING or num_own >= MAX_WAITING // 2:
            raise TooManyRequestsError(
                f"{len(self._pending)} grammars wait to be compiled, {num_own} of them yours. "
                "Fix: retry in a moment"
            )

    async def _make(self, key: bytes, asked: Mapping[str, Any], payer: Payer | None) -> Answer:
        turn = _Turn(NO_TIER if payer is None else payer.standing)
        process = await self._wait(turn)
        cpu_s = 0.0
        try:
            answer = self._kept.get(key)
            if answer is not None:  # another tenant has asked for the same
                return answer
            answer, cpu_s = await process.ask(asked, self._cpu_s)
        finally:
            self._line.charge(turn.standing.tenant, cpu_s)
            if payer is not None:
                payer.pay(cpu_s)
            self._give_back(process, turn.standing.tenant)
        size = max((len(text) for text in answer.get("grammars", ())), default=0)
        if size > MAX_GRAMMAR_BYTES:
            answer = {
                "problem": f"becomes a grammar of {size} bytes, and {MAX_GRAMMAR_BYTES} is the "
                "most. Fix: ask for less at once"
            }
        self._keep(key, answer)
        return answer

    async def _wait(self, turn: _Turn) -> CompileProcess:
        """The process that is to compile the form."""
        self._line.add(turn)
        self._begin()
        try:
            return await turn.process
        except asyncio.CancelledError:
            if turn.process.done() and not turn.process.cancelled():
                self._give_back(turn.process.result(), turn.standing.tenant)
            raise
        finally:
            self._line.remove(turn)

    def _begin(self) -> None:
        """Give processes that are idle to those whose turn it is; start one where none is."""
        while len(self._line):
            if not self._idle:
                if len(self._line) > self._num_starting:
                    self._start_one()
                return
            turn = self._line.pop(self._may_have_another)
            if turn is None:
                return
            if not turn.process.done():
                self._held[turn.standing.tenant] += 1
                turn.process.set_result(self._idle.pop())

    def _may_have_another(self, tenant: str) -> bool:
        """One process stays for others, where there are any: without keys all are one tenant."""
        return self._held[tenant] < NUM_PROCESSES - bool(tenant)

    def _give_back(self, process: CompileProcess, tenant: str) -> None:
        if process.is_there:
            self._held[tenant] -= 1
            self._idle.append(process)
            self._begin()
        else:
            self._start_soon(process, tenant)

    def _start_one(self) -> None:
        if self._off:
            self._start_soon(self._off.pop(), None)

    def _start_soon(self, process: CompileProcess, tenant: str | None) -> None:
        self._num_starting += 1
        self._starting.start(self._start(process, tenant), name="grammar-process")

    async def _start(self, process: CompileProcess, tenant: str | None) -> None:
        """Start ``process``, which is ``tenant``'s until it is there; None: nobody's."""
        try:
            await process.start()
            self._idle.append(process)
        except InternalError as error:
            logger.warning("structured output is not ready: %s", error)
            self._off.append(process)
            for turn in list(self._line):
                self._line.remove(turn)
                if not turn.process.done():
                    turn.process.set_exception(error)
        finally:
            self._num_starting -= 1
            if tenant is not None:
                self._held[tenant] -= 1
        self._begin()

    def _keep(self, key: bytes, answer: Answer) -> None:
        self._kept[key] = answer
        self._num_kept_bytes += _size(answer)
        while self._num_kept_bytes > CACHE_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= _size(oldest)


def _size(answer: Answer) -> int:
    return 256 + sum(len(text) for text in answer.get("grammars", ()))


def _refusal(answer: Answer, form: Form, param: str) -> RequestError:
    if "schema" in answer:
        param, _ = form.schemas[answer["schema"]]
    return RequestError(f"{param} {with_fix(answer['problem'])}", param=param)
