"""Makes matchers for requests: compiles grammars on threads of its own, and keeps them.

Called on a worker's event loop (any thread may), never on the one that runs steps; that one gets
the finished matcher. Grammars that clients wrote are compiled and followed in processes of their
own (`grammar.guard`). Nothing is read, imported or started before the first grammar
comes, unless `warm` was called. What is compiled is kept by its text, the least recently used first
to go once all of it is too large; two requests with one grammar compile it once.
"""

import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from grammar.guard import MAX_OUTPUTS, Guard, GuardedGrammar, GuardedMatcher
from grammar.matcher import GrammarState, Matcher
from grammar.vocabulary import read_vocabulary
from runtime.errors import DrainingError, InternalError, InvalidRequestError, TandemError
from runtime.logging import get_logger
from runtime.sampling import OutputConstraint, SamplingParams

CACHE_BYTES: Final = 256 << 20
"""Of compiled grammars. A schema of twenty fields takes some 100 KB of it at 130,000 tokens."""
MAX_GRAMMAR_BYTES: Final = 1 << 20
"""Of one text: what takes minutes to compile would keep others from being compiled."""
NUM_THREADS: Final = 2
"""That compile: a grammar that takes long holds up one other at most."""
MAX_TOKENS_AT_ONCE: Final = 32
"""Of an output that a new matcher is told by whoever asks for it, 3 us each; longer ones are told
on a thread of their own, in the order in which they came."""

logger = get_logger(__name__)


AnyMatcher = Matcher | GuardedMatcher


class Compiled(Protocol):
    """A grammar for any number of outputs."""

    num_bytes: int

    def begin(self) -> GrammarState:
        """Return the state of an empty output."""
        ...


class Compiler(Protocol):
    """What turns a text into a grammar; several threads call."""

    def compile(self, text: str) -> Compiled:
        """Compile; raises InvalidRequestError for a text that is none."""
        ...


class _Key(NamedTuple):
    """What is compiled, and where."""

    text: str
    is_guarded: bool


@dataclass(slots=True)
class _Entry:
    outcome: Future[Compiled | GuardedGrammar]
    num_bytes: int = 0

    @property
    def is_gone(self) -> bool:
        """Whether what was compiled is in a process that has ended."""
        if not self.num_bytes or not self.outcome.done():
            return False
        compiled = self.outcome.result()
        return isinstance(compiled, GuardedGrammar) and compiled.is_gone


class Constraints:
    """The grammars of one model in one process."""

    def __init__(
        self,
        folder: str | Path,
        vocab_size: int,
        *,
        cache_bytes: int = CACHE_BYTES,
        open_compiler: Callable[[Path, int], Compiler] | None = None,
    ) -> None:
        """Remember where the model is; reads nothing.

        Args:
            folder: of the checkpoint, with its tokenizer.
            vocab_size: of the model.
            cache_bytes: of compiled grammars, at most.
            open_compiler: given both, on a thread that compiles, and of what clients wrote as well;
                None for that of xgrammar, and a guard.
        """
        self._folder, self._vocab_size = Path(folder), vocab_size
        self._cache_bytes = cache_bytes
        self._open_compiler = open_compiler or _open_xgrammar
        self._compiler: Compiler | None = None
        self._guard = Guard(self._folder, vocab_size) if open_compiler is None else None
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._replays = ThreadPoolExecutor(1, thread_name_prefix="grammar-replay")
        # They wait for processes, and for none of the others.
        self._beginnings = ThreadPoolExecutor(MAX_OUTPUTS, thread_name_prefix="grammar-begin")

    def begin(
        self, params: SamplingParams, output_token_ids: Sequence[int] = ()
    ) -> Future[AnyMatcher | None]:
        """Begin to make the matcher of a request.

        Args:
            params: of the request; without a constraint its matcher is None, at once.
            output_token_ids: the output of earlier tries.

        Returns:
            The matcher, told that output. It fails with InvalidRequestError where the grammar
            cannot be compiled, where the model has no tokenizer, or where the output cannot be the
            beginning of what the grammar describes.

        Raises:
            InvalidRequestError: a field of the constraint, which the message names.
        """
        made: Future[AnyMatcher | None] = Future()
        made.set_running_or_notify_cancel()  # who stops waiting does not take it back
        constraint = params.constraint
        if constraint is None:
            made.set_result(None)
            return made
        _check(constraint, self._vocab_size)
        output = tuple(output_token_ids)
        stops = [token_id for token_id in params.stop_token_ids if 0 <= token_id < self._vocab_size]

        def make(compiled: Compiled | GuardedGrammar | None) -> AnyMatcher:
            if isinstance(compiled, GuardedGrammar):
                return compiled.begin(constraint, stops, output)
            grammar = None if compiled is None else compiled.begin()
            return make_matcher(constraint, grammar, stops, output, vocab_size=self._vocab_size)

        def settle(compiled: Future[Compiled | GuardedGrammar]) -> None:
            is_guarded = compiled.exception() is None and isinstance(
                compiled.result(), GuardedGrammar
            )
            if not is_guarded and len(output) <= MAX_TOKENS_AT_ONCE:
                _settle(made, lambda: make(compiled.result()))
            else:
                pool = self._beginnings if is_guarded else self._replays
                self._settle_later(pool, made, lambda: make(compiled.result()))

        if constraint.grammar:
            key = _Key(constraint.grammar, constraint.is_guarded and self._guard is not None)
            self._compiled(key).add_done_callback(settle)
        elif len(output) <= MAX_TOKENS_AT_ONCE:
            _settle(made, lambda: make(None))
        else:
            self._settle_later(self._replays, made, lambda: make(None))
        return made

    def warm(self) -> None:
        """Load the compiler, and sort the vocabulary, now: blocks for seconds.

        A model without a tokenizer serves all but grammars: that is only told of.
        """
        try:
            self._open()
            if self._guard is not None:
                self._guard.open()
        except TandemError as error:
            logger.warning("structured output will be refused: %s", error)

    @property
    def num_cached_bytes(self) -> int:
        """Of compiled grammars that are kept."""
        return self._num_bytes

    def close(self) -> None:
        """Compile nothing more: who waits is told so; what is being compiled ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._replays.shutdown(wait=False, cancel_futures=True)
        self._beginnings.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for key in [key for key, entry in self._entries.items() if entry.num_bytes]:
                del self._entries[key]
        if self._guard is not None:
            self._guard.close()

    def _settle_later(
        self,
        pool: ThreadPoolExecutor,
        made: Future[AnyMatcher | None],
        make: Callable[[], AnyMatcher],
    ) -> None:
        def refuse() -> None:
            made.set_exception(DrainingError("the worker ends: it takes no output up again"))

        def told(work: Future[None]) -> None:
            if work.cancelled():
                refuse()

        try:
            pool.submit(_settle, made, make).add_done_callback(told)
        except RuntimeError:  # closed
            refuse()

    def _compiled(self, key: _Key) -> Future[Compiled | GuardedGrammar]:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not entry.is_gone:
                self._entries.move_to_end(key)
                return entry.outcome
            if entry is not None:
                self._num_bytes -= entry.num_bytes
            entry = self._entries[key] = _Entry(Future())

        def told(work: Future[None]) -> None:
            if work.cancelled():
                self._refuse(key, entry)

        try:
            self._pool.submit(self._compile, key, entry).add_done_callback(told)
        except RuntimeError:  # closed
            self._refuse(key, entry)
        return entry.outcome

    def _refuse(self, key: _Key, entry: _Entry) -> None:
        """Answer those who wait for a grammar that nobody compiles any more."""
        with self._lock:
            del self._entries[key]
        entry.outcome.set_exception(DrainingError("the worker ends: it compiles no grammar"))

    def _compile(self, key: _Key, entry: _Entry) -> None:
        compiled: Compiled | GuardedGrammar
        try:
            if key.is_guarded and self._guard is not None:
                compiled = self._guard.compile(key.text)
            else:
                compiled = self._open().compile(key.text)
        except Exception as error:
            with self._lock:
                del self._entries[key]
            entry.outcome.set_exception(_as_ours(error))
            return
        with self._lock:
            entry.num_bytes = compiled.num_bytes + len(key.text)
            self._num_bytes += entry.num_bytes
            self._evict()
            # What is kept holds none of those who waited: their outputs would never end.
            waiting, entry.outcome = entry.outcome, Future()
            entry.outcome.set_result(compiled)
        waiting.set_result(compiled)

    def _evict(self) -> None:
        """Forget the least recently used of those that are compiled."""
        for key, entry in list(self._entries.items()):
            if self._num_bytes <= self._cache_bytes:
                return
            if entry.num_bytes:
                del self._entries[key]
                self._num_bytes -= entry.num_bytes

    def _open(self) -> Compiler:
        with self._opening:
            if self._compiler is None:
                self._compiler = self._open_compiler(self._folder, self._vocab_size)
            return self._compiler


def _open_xgrammar(folder: Path, vocab_size: int) -> Compiler:
    vocabulary = read_vocabulary(folder, vocab_size)
    # Imported late: it takes a second, and most workers are never asked for a grammar.
    compiler: Compiler = importlib.import_module("grammar.grammars").Grammars(vocabulary)
    return compiler


def _as_ours(error: Exception) -> TandemError:
    if isinstance(error, TandemError):
        return error
    logger.error("a grammar could not be compiled or followed", exc_info=error)
    return InternalError(f"a grammar could not be compiled or followed: {error!r}")


def _settle(made: Future[AnyMatcher | None], make: Callable[[], AnyMatcher]) -> None:
    try:
        matcher = make()
    except Exception as error:
        made.set_exception(_as_ours(error))
    else:
        made.set_result(matcher)


def make_matcher(
    constraint: OutputConstraint,
    grammar: GrammarState | None,
    stop_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    *,
    vocab_size: int,
) -> Matcher:
    """Return the matcher of an output that has begun.

    Args:
        constraint: what is asked for.
        grammar: at its beginning; None where the constraint has none.
        stop_token_ids: below `vocab_size`.
        output_token_ids: of earlier tries.
        vocab_size: of the model.

    Raises:
        InvalidRequestError: the output is no beginning of the grammar's, or whole.
    """
    matcher = Matcher(constraint, grammar, stop_token_ids=stop_token_ids, vocab_size=vocab_size)
    matcher.follow(output_token_ids)
    if matcher.error is not None:
        raise InvalidRequestError(
            f"the output so far is none of constraint.grammar's: {matcher.error.message}"
        )
    if matcher.is_over:
        raise InvalidRequestError(
            f"nothing can follow the {len(output_token_ids)} output tokens so far by "
            "constraint.grammar: the request was over"
        )
    return matcher


def _check(constraint: OutputConstraint, vocab_size: int) -> None:
    for token_id in constraint.starts_after:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"constraint.starts_after has token id {token_id}; the model knows "
                f"0..{vocab_size - 1}"
            )
    if constraint.max_tokens_before and not constraint.starts_after:
        raise InvalidRequestError(
            f"constraint.max_tokens_before is {constraint.max_tokens_before} and "
            "constraint.starts_after is empty: give the tokens that end what is limited"
        )
    num_bytes = len(constraint.grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"constraint.grammar has {num_bytes} bytes: give at most {MAX_GRAMMAR_BYTES}"
        )
