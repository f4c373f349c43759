"""Follows grammars that clients wrote: processes that may be ended in the middle of a mask.

``python -m grammar.guard_process FOLDER VOCAB_SIZE FD`` sorts the vocabulary and then
forks for whoever is at the other end of the socket FD (`grammar.guard`):

    this process     a socket comes: forks one for a grammar
    of a grammar     a text comes: compiles it, and then forks one for each socket that comes
    of an output     a beginning comes, then tokens and drafts: answers each with masks

Each ends with the socket that it reads, and once it has used up its CPU, of which the kernel keeps
count. Each mask adds to that of an output, so those may be of any length whose masks are quick.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grammar.constraints import make_matcher
from grammar.grammars import CompiledGrammar, Grammars
from grammar.guard import (
    CREDIT_CPU_S,
    MASK_CPU_S,
    MAX_BYTES,
    OUTPUT_BYTES,
)
from grammar.guard_messages import Messages, send
from grammar.matcher import Int32Array, Matcher, has_bit, num_mask_words
from grammar.vocabulary import read_vocabulary
from runtime.errors import InternalError, TandemError
from runtime.process import limit_memory
from runtime.sampling import OutputConstraint

NICENESS = 5
"""A step waits for these masks, and not for long: it comes first where cores are few."""


class Credit:
    """Seconds of CPU; who uses more is ended."""

    def __init__(self, seconds: float) -> None:
        self._most = self._left = seconds

    @contextlib.contextmanager
    def spent(self, more: float = 0.0) -> Iterator[None]:
        """Spend what is left, and so much more, within."""
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which is to end
        signal.setitimer(signal.ITIMER_PROF, self._left + more)
        try:
            yield
        finally:
            left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
            self._left = max(min(left, self._most), 0.001)


class Output:
    """What one process follows."""

    def __init__(self, grammar: CompiledGrammar, vocab_size: int) -> None:
        self._grammar, self._vocab_size = grammar, vocab_size
        self._words: Int32Array = np.zeros(num_mask_words(vocab_size), dtype=np.int32)
        self._credit = Credit(CREDIT_CPU_S)

    def follow(self, end: socket.socket) -> None:
        """Answer what comes by `end`."""
        limit_memory(OUTPUT_BYTES)
        send(end, {"process_id": os.getpid()})
        messages = Messages(end)
        content, raw = messages.next()
        try:
            with self._credit.spent(MASK_CPU_S):
                matcher = self._begin(content, _ids(raw))
                answer = self._masked(matcher)
        except TandemError as error:
            send(end, {"are_drafts": False, **_told(error)})
            return
        send(end, *answer)
        while True:
            content, raw = messages.next()
            ids = _ids(raw)
            with self._credit.spent(MASK_CPU_S * len(ids)):
                if content["are_drafts"]:
                    answer = self._behind(matcher, ids)
                else:
                    matcher.take_each(matcher.num_taken, ids)
                    answer = self._masked(matcher)
            send(end, *answer)

    def _begin(self, content: dict[str, Any], output: Sequence[int]) -> Matcher:
        constraint = OutputConstraint(
            starts_after=tuple(content["starts_after"]),
            max_tokens_before=content["max_tokens_before"],
        )
        stops = content["stop_token_ids"]
        grammar = self._grammar.begin()
        return make_matcher(constraint, grammar, stops, output, vocab_size=self._vocab_size)

    def _masked(self, matcher: Matcher) -> tuple[dict[str, Any], bytes]:
        """What follows the output, and its mask."""
        is_masked = matcher.is_binding
        if is_masked:
            matcher.fill(self._words)
        answer: dict[str, Any] = {"are_drafts": False}
        if matcher.error is not None:
            return {**answer, **_told(matcher.error)}, b""
        answer |= {"over_at": matcher.over_at, "num_rows": int(is_masked)}
        return answer, self._words.tobytes() if is_masked else b""

    def _behind(self, matcher: Matcher, drafts: Sequence[int]) -> tuple[dict[str, Any], bytes]:
        """Masks behind drafts, up to the first that may not come, or with which it is over."""
        rows: list[Int32Array] = []
        if matcher.is_binding:
            mark, before = matcher.mark(), self._words
            for draft in drafts:
                if draft < 0 or not has_bit(before, draft):
                    break
                matcher.take(matcher.num_taken, draft)
                if not matcher.is_binding:
                    break
                before = np.empty_like(self._words)
                matcher.fill(before)
                if matcher.error is not None:
                    break
                rows.append(before)
            matcher.go_back(mark)
        return {"are_drafts": True, "num_rows": len(rows)}, b"".join(row.tobytes() for row in rows)


def _ids(raw: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(raw, dtype=np.int32).tolist()
    return ids


def _told(error: TandemError) -> dict[str, Any]:
    return {"error": error.message, "code": int(error.code), "num_rows": 0}


def _follow_grammar(grammars: Grammars, vocab_size: int, end: socket.socket) -> None:
    """Compile what comes by `end`, and follow its outputs."""
    content, _ = Messages(end).next()
    try:
        with Credit(content["cpu_s"]).spent():
            grammar = grammars.compile(content["grammar"])
    except TandemError as error:
        send(end, _told(error))
        return
    except Exception as error:
        send(end, _told(InternalError(f"a grammar could not be compiled: {error!r}")))
        return
    send(end, {"num_bytes": grammar.num_bytes})
    _fork_for_each(end, Output(grammar, vocab_size).follow)


def _fork_for_each(end: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """Fork for each socket that comes by `end`, until that is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        _, numbers, _, _ = socket.recv_fds(end, 1, 1)
        if not numbers:
            return
        theirs = socket.socket(fileno=numbers[0])
        if os.fork() == 0:
            try:
                end.close()
                work(theirs)
            finally:
                os._exit(0)  # an error is one more way to close the socket
        theirs.close()


def main(folder: str, vocab_size: str, number: str) -> None:
    """Fork until the other end of the socket is closed."""
    os.nice(NICENESS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the library writes of what clients wrote
    os.dup2(1, 2)
    with socket.socket(fileno=int(number)) as end:
        try:
            # On one thread: of others a fork would have nothing but their locks.
            grammars = Grammars(read_vocabulary(Path(folder), int(vocab_size)), num_threads=1)
        except TandemError as error:
            send(end, _told(error))
            return
        limit_memory(MAX_BYTES)
        send(end, {})
        _fork_for_each(end, lambda theirs: _follow_grammar(grammars, int(vocab_size), theirs))


if __name__ == "__main__":
    main(*sys.argv[1:])
