"""Which tokens may come next in one request's output: pure, a function of the output so far.

A `Matcher` is made for a constraint and then told the output token by token; one that is told the
same output anew, after a retry, a move to another worker or a preemption, is in the same state.
Nothing here knows text, devices or threads. The thread that runs steps owns it from then on.

    before the marker   anything but stop tokens; once the budget is used up the marker, by force
    in the grammar      what can go on with it; stop tokens where it may end
    over                nothing: the request ends with the token that leaves nothing to follow
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from runtime.errors import InternalError, InvalidRequestError, TandemError
from runtime.sampling import OutputConstraint

Int32Array = npt.NDArray[np.int32]

WORD_BITS = 32


def num_mask_words(vocab_size: int) -> int:
    """Return how many 32-bit words have a bit for every token."""
    return -(-vocab_size // WORD_BITS)


class GrammarState(Protocol):
    """How far an output has come in a grammar; knows no stop tokens."""

    def accept(self, token_id: int) -> bool:
        """Go on with a token; False, and no change, where it cannot follow."""
        ...

    def roll_back(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""
        ...

    def fill_rows(self, states: Sequence[Self], words: Int32Array, rows: Sequence[int]) -> None:
        """Set the bits of the tokens that can follow, and clear all others.

        Args:
            states: over one vocabulary; any of them may be asked for all.
            words: [R, W] int32 and contiguous; token t is bit t % 32 of word t // 32.
            rows: of the states, in their order; other rows stay as they are.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        ...


class Bookmark(NamedTuple):
    """Where a `Matcher` was; to be gone back to before it is told anything else."""

    num_taken: int
    num_matched: int
    has_started: bool
    num_accepted: int


class Matcher:
    """The state of one output.

    Attributes:
        num_taken: output tokens that it was told.
        is_over: nothing can follow.
        error: why the request cannot go on: it was told a token that could not follow, or none can.
        mask_s: seconds that its latest mask took, or its share in those filled with it.
        filled_at: when that began, on the clock of `time.perf_counter`.
        is_alone: the next is to be measured by itself: it, or one that was filled with it, is slow.
    """

    is_ready: Final = True
    """That of one whose masks are made elsewhere may be late."""
    cpu_s: Final = 0.0
    """Seconds that a process of its own has used."""

    def __init__(
        self,
        constraint: OutputConstraint,
        grammar: GrammarState | None,
        *,
        stop_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        """Begin before the first output token.

        Args:
            constraint: what is asked for.
            grammar: at its beginning; None where the constraint has none.
            stop_token_ids: below `vocab_size`; they end the output where the grammar may end.
            vocab_size: of the model.
        """
        self._marker = constraint.starts_after
        self._borders = _borders(self._marker)
        self._num_matched = 0  # of the marker, by the latest tokens
        self._has_started = not self._marker
        self._budget = constraint.max_tokens_before
        self._grammar = grammar
        self._stops = frozenset(stop_token_ids)
        self._stop_bits = _bits_of(stop_token_ids)
        self._num_words = num_mask_words(vocab_size)
        self._num_accepted = 0  # by the grammar
        self.num_taken = 0
        self.is_over = False
        self.over_at: int | None = None  # tokens of the output that is over
        self.error: TandemError | None = None
        self.mask_s = self.filled_at = 0.0
        self.is_alone = False

    @property
    def is_binding(self) -> bool:
        """Whether some token may not come next."""
        if self.is_over or self.error is not None:
            return False
        return self._grammar is not None or self._is_forced

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Take those tokens of an output that were not taken yet."""
        if self.num_taken < len(output_token_ids):
            *before, last = output_token_ids[self.num_taken :]
            for token_id in before:
                self._take(token_id, is_last=False)
            self._take(last)

    def take(self, index: int, token_id: int) -> None:
        """Take the token at an output index, if it is the next.

        Others were taken already, or belong to a request that ended at a token before.
        """
        if index == self.num_taken:
            self._take(token_id)

    def take_each(self, index: int, token_ids: Sequence[int]) -> None:
        """Take tokens from an output index on; see `take`."""
        for place, token_id in enumerate(token_ids, index):
            self.take(place, token_id)

    def is_over_after(self, num_output_tokens: int) -> bool:
        """Return whether nothing can follow so many tokens; it may have been told more of them."""
        return self.over_at is not None and self.over_at <= num_output_tokens

    def mark(self) -> Bookmark:
        """Return where this one is, before it is told tokens that may not come; it must go on."""
        assert not self.is_over
        assert self.error is None
        return Bookmark(self.num_taken, self._num_matched, self._has_started, self._num_accepted)

    def go_back(self, bookmark: Bookmark) -> None:
        """Forget the tokens that were taken since."""
        num_beyond = self._num_accepted - bookmark.num_accepted
        if num_beyond:
            assert self._grammar is not None
            self._grammar.roll_back(num_beyond)
        self.num_taken, self._num_matched, self._has_started, self._num_accepted = bookmark
        self.is_over, self.over_at, self.error = False, None, None

    def fill(self, words: Int32Array) -> None:
        """Fill the mask of this one: see `fill_masks`.

        Args:
            words: [W] int32 and contiguous.
        """
        fill_masks([self], words[None])

    @property
    def _is_forced(self) -> bool:
        return not self._has_started and 0 < self._budget <= self.num_taken

    def _take(self, token_id: int, *, is_last: bool = True) -> None:
        self.num_taken += 1
        if not self._has_started:
            self._look_for_marker(token_id)
        elif self._grammar is not None and not self.is_over and self.error is None:
            self._go_on(self._grammar, token_id, is_last=is_last)

    def _look_for_marker(self, token_id: int) -> None:
        """One step of Knuth, Morris and Pratt's search."""
        while self._num_matched and self._marker[self._num_matched] != token_id:
            self._num_matched = self._borders[self._num_matched - 1]
        if self._marker[self._num_matched] == token_id:
            self._num_matched += 1
        self._has_started = self._num_matched == len(self._marker)

    def _go_on(self, grammar: GrammarState, token_id: int, *, is_last: bool) -> None:
        if token_id in self._stops:
            is_taken = grammar.is_complete
            if is_taken:
                self._end_here()
        else:
            is_taken = grammar.accept(token_id)
            self._num_accepted += is_taken
        if not is_taken:
            self.error = InternalError(
                f"output token {token_id} at index {self.num_taken - 1} cannot follow by the "
                "grammar. Fix: run one version of Tandem and xgrammar on all workers"
            )
        elif is_last and not self.is_over and grammar.is_complete:
            words = np.empty((1, self._num_words), dtype=np.int32)
            grammar.fill_rows([grammar], words, [0])
            self._clear_stops(words[0])
            if not words.any():
                self._end_here()

    def _end_here(self) -> None:
        self.is_over, self.over_at = True, self.num_taken

    def _fill_early(self, words: Int32Array) -> None:
        """Fill where the grammar does not hold yet."""
        if self._is_forced:
            words[:] = 0
            _set_bit(words, self._marker[self._num_matched])
        else:
            words[:] = -1
            self._clear_stops(words)

    def _set_stops(self, words: Int32Array) -> None:
        """Say which stop tokens may come, where the grammar has said which others may.

        A stop token that is a text as well only stops.
        """
        assert self._grammar is not None
        if self._grammar.is_complete:
            for place, bits in self._stop_bits:
                words[place] |= bits
        else:
            self._clear_stops(words)

    def _clear_stops(self, words: Int32Array) -> None:
        for place, bits in self._stop_bits:
            words[place] &= ~bits

    def _fail(self) -> None:
        self.error = InvalidRequestError(
            f"after {self.num_taken} output tokens the grammar leaves no token of the model's "
            "vocabulary, and may not end: every part of it needs an end that tokens can spell"
        )


def fill_masks(matchers: Sequence[Matcher], words: Int32Array) -> None:
    """Set the bits of the tokens that may come next, and clear all others.

    Where none may, the matcher's `error` says so afterwards, and it is not binding any more.

    Args:
        matchers: of one vocabulary, all of them binding.
        words: [C, W] int32 and contiguous, a row for each; see `GrammarState.fill_rows`. Bits
            beyond the vocabulary mean nothing.
    """
    states: list[GrammarState] = []
    rows: list[int] = []
    for row, matcher in enumerate(matchers):
        if matcher._has_started and matcher._grammar is not None:
            states.append(matcher._grammar)
            rows.append(row)
        else:
            matcher._fill_early(words[row])
    if states:
        states[0].fill_rows(states, words, rows)
    for row in rows:
        matchers[row]._set_stops(words[row])
    for row in np.flatnonzero(np.bitwise_or.reduce(words, axis=1) == 0).tolist():
        matchers[row]._fail()


def _borders(marker: Sequence[int]) -> list[int]:
    """Return, per place, how long a true beginning of the marker also ends there."""
    borders = [0] * len(marker)
    for place in range(1, len(marker)):
        length = borders[place - 1]
        while length and marker[length] != marker[place]:
            length = borders[length - 1]
        borders[place] = length + (marker[length] == marker[place])
    return borders


def _bits_of(token_ids: Sequence[int]) -> list[tuple[int, np.int32]]:
    """Return the words of these tokens, and their bits in them: few, beside all of a mask."""
    bits: dict[int, int] = {}
    for token_id in token_ids:
        place = token_id // WORD_BITS
        bits[place] = bits.get(place, 0) | 1 << token_id % WORD_BITS
    return [(place, np.uint32(value).view(np.int32)) for place, value in bits.items()]


def has_bit(words: Int32Array, token_id: int) -> bool:
    """Return whether a mask [W] leaves a token."""
    bit = np.uint32(1 << token_id % WORD_BITS)
    return bool(words.view(np.uint32)[token_id // WORD_BITS] & bit)


def _set_bit(words: Int32Array, token_id: int) -> None:
    words.view(np.uint32)[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
