"""Outputs whose grammars clients wrote, each followed by a process of its own (`guard_process`).

A mask is made in a call that nothing can interrupt, and what a client wrote may make it take hours.
So such grammars are compiled and followed in processes that the kernel ends once they have used up
their CPU, and the thread that runs steps waits for masks only so long (`settle`). A matcher whose
answer is not there in time is late: its row samples nothing in this step, and the request comes
back when it is there. One that never comes ends its request, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from grammar.guard_messages import Messages, send
from grammar.matcher import Int32Array, Matcher
from runtime.errors import (
    ERRORS_BY_CODE,
    ErrorCode,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    TandemError,
)
from runtime.process import thread_limits
from runtime.sampling import OutputConstraint

WAIT_S: Final = 0.02
"""That a step waits for the masks of all its rows."""
LATE_S: Final = 30.0
"""That a mask may be late, where others leave it little CPU."""
MASK_CPU_S: Final = 0.05
"""That a mask may take, again and again: most take a thousandth of it."""
CREDIT_CPU_S: Final = 1.0
"""That the masks of one output may take beyond that, all in all."""
COMPILE_CPU_S: Final = 5.0
"""That one grammar may take, as in the router's process."""
MAX_BYTES: Final = 4 << 30
"""Of address space that compiling may take, beyond what the libraries have."""
OUTPUT_BYTES: Final = 256 << 20
"""The same of following an output."""
MAX_OUTPUTS: Final = 256
"""At a time in one worker; each has a process of some megabytes."""
PROCESS_BYTES: Final = 16 << 20
"""That a process of a grammar counts beside what is compiled."""
START_S: Final = 120.0
"""That processes may take to answer: machines are busy."""
_LATE_NICENESS: Final = 19


class Guard:
    """Compiles what clients wrote; any thread may call."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Start nothing yet: see `open`."""
        self._arguments = (str(folder), str(vocab_size))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def open(self) -> None:
        """Have the process there that others are forked from: blocks for seconds, once.

        Raises:
            TandemError: it cannot be.
        """
        with self._lock:
            self._running()

    def compile(self, text: str) -> GuardedGrammar:
        """Have a grammar compiled; blocks.

        Raises:
            InvalidRequestError: it is none, or takes too much CPU or memory.
            InternalError: the process does not answer.
        """
        with self._lock:
            try:
                end = _fork_by(self._running())
            except OSError:
                self._end()
                end = _fork_by(self._running())
        end.settimeout(START_S)
        try:
            send(end, {"grammar": text, "cpu_s": COMPILE_CPU_S})
            answer, _ = Messages(end).next()
        except (EOFError, ConnectionError):
            end.close()
            raise InvalidRequestError(
                f"constraint.grammar takes more than {COMPILE_CPU_S:g} s of CPU, or too much "
                "memory, to compile: ask for less"
            ) from None
        except TimeoutError as error:
            end.close()
            raise InternalError(f"no grammar was compiled within {START_S:.0f} s") from error
        if "error" in answer:
            end.close()
            raise _error_of(answer)
        return GuardedGrammar(end, answer["num_bytes"])

    def close(self) -> None:
        """End the process, which forks no more."""
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None:
            assert self._control is not None
            return self._control
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "grammar.guard_process"),
                    *(*self._arguments, str(theirs.fileno())),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **thread_limits(1)},
            )
        self._control = ours
        ours.settimeout(START_S)
        try:
            answer, _ = Messages(ours).next()
        except (EOFError, TimeoutError) as error:
            self._end()
            raise InternalError("the process that follows grammars does not start") from error
        if "error" in answer:
            self._end()
            raise _error_of(answer)
        return ours

    def _end(self) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


class GuardedGrammar:
    """A compiled grammar, and the process that has it."""

    def __init__(self, end: socket.socket, num_bytes: int) -> None:
        self._end, self.num_bytes = end, num_bytes + PROCESS_BYTES
        self._lock = threading.Lock()
        end.setblocking(False)  # nothing more comes by it
        weakref.finalize(self, end.close)

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        try:
            return not self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def begin(
        self, constraint: OutputConstraint, stop_token_ids: Sequence[int], output: Sequence[int]
    ) -> GuardedMatcher:
        """Have an output followed; blocks until its first mask is there.

        Args:
            constraint: of this grammar.
            stop_token_ids: below the vocabulary's size.
            output: of earlier tries.

        Raises:
            TandemError: the output is none of the grammar's; there is no room; no first mask.
        """
        with self._lock:
            end = _fork_by(self._end)
        matcher = GuardedMatcher(end, len(output))
        matcher.begin(
            {
                "starts_after": constraint.starts_after,
                "max_tokens_before": constraint.max_tokens_before,
                "stop_token_ids": list(stop_token_ids),
            },
            output,
        )
        if matcher.error is not None:
            raise matcher.error
        return matcher


class GuardedMatcher:
    """The state of one output, as its process says it; see `Matcher`, which it stands for.

    Attributes:
        num_taken: output tokens that it was told.
        is_over: nothing can follow, as far as is known.
        error: why the request cannot go on.
        words: the mask of the next token, [W] int32.
        words_behind: those behind the drafts that were asked for last, as far as they may come.
    """

    _num_live = 0
    _counting = threading.Lock()

    def __init__(self, end: socket.socket, num_taken: int) -> None:
        """Take the socket of a process that waits for a beginning."""
        self._end, self._messages = end, Messages(end)
        closing = weakref.finalize(self, _close_output, end)
        with self._counting:
            GuardedMatcher._num_live += 1
            is_full = GuardedMatcher._num_live > MAX_OUTPUTS
        if is_full:
            closing()
            raise OverloadedError(
                f"{MAX_OUTPUTS} outputs by clients' own grammars are written here: try again"
            )
        self._num_asked = 0
        self._process_id, self._cpu_s = 0, 0.0
        self._over_at: int | None = None
        self._is_late, self._late_until = False, 0.0
        self.num_taken = num_taken
        self.is_over = False
        self.error: TandemError | None = None
        self.words: Int32Array = np.empty(0, dtype=np.int32)
        self.words_behind: list[Int32Array] = []

    def begin(self, content: Mapping[str, Any], output: Sequence[int]) -> None:
        """Say how the output begins, and wait for the first mask."""
        self._end.settimeout(START_S)
        try:
            hello, _ = self._messages.next()
        except (EOFError, TimeoutError) as error:
            raise InternalError("the process that follows an output does not start") from error
        self._process_id = hello["process_id"]
        self._ask(content, output)
        self.settle(time.monotonic() + WAIT_S)
        self.settle(time.monotonic() + LATE_S)
        if self._is_late:
            self._give_up()

    @property
    def is_ready(self) -> bool:
        """Whether the mask of the next token is there, or why there will be none."""
        if self._is_late:
            self.settle(0.0)
        if self._is_late and time.monotonic() > self._late_until:
            self._give_up()
        return not self._is_late

    @property
    def is_binding(self) -> bool:
        """See `Matcher`."""
        return not self.is_over and self.error is None

    @property
    def cpu_s(self) -> float:
        """Seconds that its process has used; of one that is gone those that are known."""
        return max(self._cpu_s, _cpu_s_of(self._process_id))

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """See `Matcher`; what comes of it is known once it is settled."""
        if self.num_taken < len(output_token_ids):
            self._tell(output_token_ids[self.num_taken :])

    def take_each(self, index: int, token_ids: Sequence[int]) -> None:
        """See `Matcher`; what comes of it is known once it is settled."""
        if index <= self.num_taken < index + len(token_ids):
            self._tell(token_ids[self.num_taken - index :])

    def is_over_after(self, num_output_tokens: int) -> bool:
        """See `Matcher`."""
        return self._over_at is not None and self._over_at <= num_output_tokens

    def ask(self, drafts: Sequence[int]) -> None:
        """Ask for the masks behind drafts, which are no tokens of the output."""
        self.words_behind = []
        if drafts and self.is_binding:
            self._ask({"are_drafts": True}, drafts)

    def settle(self, until: float) -> None:
        """Wait for what was asked, until a time of `time.monotonic`; then it is late."""
        while self._num_asked:
            self._end.settimeout(max(until - time.monotonic(), 0.0))
            try:
                self._hear(*self._messages.next())
            except EOFError:
                self._cpu_s = max(self._cpu_s, CREDIT_CPU_S)
                self._fail()
            except (TimeoutError, BlockingIOError):
                self._be_late()
                return
        self._is_late = False

    def _tell(self, token_ids: Sequence[int]) -> None:
        self.num_taken += len(token_ids)
        if self.is_binding:
            self._ask({"are_drafts": False}, token_ids)

    def _ask(self, content: Mapping[str, Any], token_ids: Sequence[int]) -> None:
        self._cpu_s = self.cpu_s
        self._num_asked += 1
        try:
            send(self._end, content, np.array(token_ids, dtype=np.int32).tobytes())
        except OSError:
            self._fail()

    def _hear(self, answer: Mapping[str, Any], raw: bytes) -> None:
        self._num_asked -= 1
        words = list(np.frombuffer(raw, dtype=np.int32).reshape(max(answer["num_rows"], 1), -1))
        if answer["are_drafts"]:
            self.words_behind = words[: answer["num_rows"]]
            return
        if "error" in answer:
            self.error = _error_of(answer)
        elif answer["over_at"] is not None:
            self.is_over, self._over_at = True, answer["over_at"]
        else:
            self.words = words[0]

    def _be_late(self) -> None:
        """Let the process that takes long have what CPU is left by others."""
        if self._is_late:
            return
        self._is_late, self._late_until = True, time.monotonic() + LATE_S
        with contextlib.suppress(OSError):
            if _cpu_s_of(self._process_id) - self._cpu_s > WAIT_S / 2:
                os.setpriority(os.PRIO_PROCESS, self._process_id, _LATE_NICENESS)

    def _give_up(self) -> None:
        self._cpu_s = self.cpu_s
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process_id, signal.SIGKILL)
        self._fail()

    def _fail(self) -> None:
        self._num_asked, self._is_late = 0, False
        self.error = self.error or InvalidRequestError(
            f"constraint.grammar is too ambiguous: what may come after {self.num_taken} output "
            f"tokens takes more than {CREDIT_CPU_S:g} s of CPU, {LATE_S:g} s of time, or too much "
            "memory, to find. "
            "Fix: write it so that a text can be read in one way"
        )


def settle(matchers: Iterable[Matcher | GuardedMatcher]) -> None:
    """Wait together, and no longer than a step may, for what was asked of guarded ones."""
    until = time.monotonic() + WAIT_S
    for matcher in matchers:
        if isinstance(matcher, GuardedMatcher) and matcher.is_ready:
            matcher.settle(until)


def _fork_by(end: socket.socket) -> socket.socket:
    """Have the process at the other end fork; the socket of what it forks."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(end, [b"f"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours


def _close_output(end: socket.socket) -> None:
    end.close()
    with GuardedMatcher._counting:
        GuardedMatcher._num_live -= 1


def _cpu_s_of(process_id: int) -> float:
    """CPU that a process has used; 0 where it is gone."""
    try:
        return time.clock_gettime(~process_id << 3 | 2)  # as clock_getcpuclockid(3) does
    except OSError:
        return 0.0


def _error_of(answer: Mapping[str, Any]) -> TandemError:
    return ERRORS_BY_CODE[ErrorCode(answer["code"])](answer["error"])
