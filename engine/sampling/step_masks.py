"""The masks of one step: which rows of logits are bound, and what their matchers leave.

Called on the thread that launches steps, between a step's forward and its sampling. What the step
before has sampled decides the masks of this one, so `read` waits for it; only where a row is bound,
and with this step's forward behind it on the device, which the host uses for the masks meanwhile.

Masks of guarded matchers are made in other processes meanwhile, all others here. Rows whose masks
take long share `BUDGET_S` of a step and take turns. A row whose mask is not there in time is lost
(`ScheduledRequest.lose`): what it samples is nobody's token.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.host_copy import host_tensor
from engine.request import ScheduledRequest
from engine.sampling.token_mask import NO_DRAFT, MaskedDrafts, TokenMask
from grammar.guard import GuardedMatcher, settle
from grammar.matcher import Int32Array, Matcher, fill_masks, has_bit, num_mask_words

BUDGET_S: Final = 0.02
"""Of a step, for masks that take long: as long as it waits for guarded ones."""
QUICK_S: Final = 0.0005
"""Most masks take a hundredth of it; a bounded string's takes four times that at 130,000 tokens."""
GROUP: Final = 32
"""Rows that are filled together, and of which only their sum is measured."""
MOST_HIDDEN_S: Final = BUDGET_S / 8
"""What one of a group is taken for whose sum is much: a few steps find out which it is."""
ReadTokens = Callable[[], Mapping[int, Sequence[int]]]
"""Waits for the tokens of the step before, one or with drafts more; by `id` of their requests,
without those that failed."""


ReadDrafts = Callable[[int], Sequence[int]]
"""The drafts of a sequence, by its place in the step; waits for the step that made them."""


class StepDrafts(NamedTuple):
    """The drafts that a step verifies: how many rows there are for them, K, and what they are."""

    num_drafts: int
    read: ReadDrafts


class _Sequence(NamedTuple):
    """A sequence of the step whose output can go on: its place, and its matcher."""

    place: int
    matcher: Matcher


def mask_of_step(
    samplers: Sequence[ScheduledRequest],
    vocab_size: int,
    read: ReadTokens,
    device: torch.device,
    step_drafts: StepDrafts | None = None,
) -> TokenMask | None:
    """Bring the matchers of a step up to date and ask them; None where no row is bound.

    Args:
        samplers: what the rows of logits are of, in order; with drafts K + 1 rows of each.
        vocab_size: of the model.
        read: called at most once, and not where every token is known.
        device: to which the mask goes.
        step_drafts: told after `read`; None in a step without.
    """
    assert all(item.request.is_bound_by_known for item in samplers), "no matcher of a constraint"
    guarded, going = _brought_up_to_date(samplers, read)
    if not going and not guarded:
        return None
    num_drafts = 0 if step_drafts is None else step_drafts.num_drafts
    going, left = _in_turn(going, num_drafts + 1)
    for one in left:
        samplers[one.place].lose()
    read_drafts = None if step_drafts is None or not num_drafts else step_drafts.read
    if read_drafts is not None:
        for place, matcher in guarded:
            matcher.ask(read_drafts(place)[:num_drafts])
    places = [one.place for one in going] + [place for place, _ in guarded]
    masks = _Masks(len(places), num_drafts + 1, num_mask_words(vocab_size), device)
    drafts = MaskedDrafts(
        seqs=np.array(places, dtype=np.int64),
        token_ids=np.full((len(places), num_drafts), NO_DRAFT, dtype=np.int64),
    )
    if going:
        _fill_behind(going, masks, drafts.token_ids, read_drafts)
    settle(matcher for _, matcher in guarded)
    for row, (place, matcher) in enumerate(guarded, len(going)):
        if not matcher.is_ready or matcher.is_over:
            samplers[place].lose()
        elif matcher.error is None:
            masks.put(place, [matcher.words, *matcher.words_behind])
            if read_drafts is not None:
                verified = read_drafts(place)[: len(matcher.words_behind)]
                drafts.token_ids[row, : len(verified)] = verified
    return masks.finish(drafts if num_drafts else None)


def _brought_up_to_date(
    samplers: Sequence[ScheduledRequest], read: ReadTokens
) -> tuple[list[tuple[int, GuardedMatcher]], list[_Sequence]]:
    """Tell the matchers of a step what they have not heard; guarded ones, and others that go on."""
    constrained = [
        (place, item, item.request.matcher)
        for place, item in enumerate(samplers)
        if item.request.matcher is not None
    ]
    unread = read() if any(item.num_unread for _, item, _ in constrained) else {}
    guarded: list[tuple[int, GuardedMatcher]] = []
    going: list[_Sequence] = []
    for place, item, matcher in constrained:
        request = item.request
        matcher.follow(request.output_token_ids)
        if item.num_unread:
            if id(request) not in unread:
                continue  # it is about to end; nobody will hear of this token
            matcher.take_each(len(request.output_token_ids), unread[id(request)])
        if isinstance(matcher, GuardedMatcher):
            guarded.append((place, matcher))
        elif not matcher.is_over and matcher.error is None:
            going.append(_Sequence(place, matcher))
    return guarded, going


def _in_turn(going: Sequence[_Sequence], num_masks: int) -> tuple[list[_Sequence], list[_Sequence]]:
    """Those whose masks are made in this step, so many of each, and those that it has no time for.

    One is made in any case: each has its turn.
    """
    taken = [one for one in going if one.matcher.mask_s <= QUICK_S]
    slow = [one for one in going if one.matcher.mask_s > QUICK_S]
    slow.sort(key=lambda one: one.matcher.filled_at)
    seconds, number = 0.0, 0
    for one in slow:
        seconds += one.matcher.mask_s * num_masks
        if number and seconds > BUDGET_S:
            break
        number += 1
    return taken + slow[:number], slow[number:]


def _kind(matcher: Matcher) -> int:
    """With which others its mask is made: 0 with quick ones, 1 with slow ones, 2 with none."""
    return 2 if matcher.is_alone else int(matcher.mask_s > QUICK_S)


def _groups(matchers: Sequence[Matcher]) -> Iterator[list[Matcher]]:
    """Those whose masks are made together, all of them in their order."""
    for kind, alike in itertools.groupby(matchers, _kind):
        size = 1 if kind == 2 else GROUP
        while group := list(itertools.islice(alike, size)):
            yield group


def _fill_measured(matchers: Sequence[Matcher], words: Int32Array) -> None:
    """Fill masks, and remember what each takes.

    Of a group only the sum is known: where that is much, each is measured by itself next time.

    Args:
        matchers: see `fill_masks`; sorted by `_kind`.
        words: [C, W] int32.
    """
    first = 0
    for group in _groups(matchers):
        began = time.perf_counter()
        fill_masks(group, words[first : first + len(group)])
        first += len(group)
        each_s = (time.perf_counter() - began) / len(group)
        is_hidden = len(group) > 1 and each_s > QUICK_S and _kind(group[0]) == 0
        for matcher in group:
            matcher.filled_at, matcher.is_alone = began, is_hidden
            matcher.mask_s = min(each_s, MOST_HIDDEN_S) if is_hidden else each_s


class _Masks:
    """Masks of a step's rows, put together row by row."""

    def __init__(self, num_seqs: int, num_rows: int, num_words: int, device: torch.device) -> None:
        self._shape, self._device = (num_seqs * num_rows, num_words), device
        self._num_rows = num_rows
        self._rows: list[int] = []
        self._words: torch.Tensor | None = None

    def fill(self, sequences: Sequence[_Sequence], behind: int) -> dict[int, Int32Array]:
        """Fill the masks of the rows behind so many drafts; by place, where they are bound."""
        bound = [one for one in sequences if one.matcher.is_binding]
        bound.sort(key=lambda one: _kind(one.matcher))
        if not bound:
            return {}
        if self._words is None:
            # Where the copy to the device begins: a mask of 64 rows is a megabyte.
            self._words = host_tensor(self._shape, torch.int32, self._device)
        first = len(self._rows)
        self._rows += [one.place * self._num_rows + behind for one in bound]
        words = self._words[first : len(self._rows)].numpy()
        _fill_measured([one.matcher for one in bound], words)
        return {one.place: mask for one, mask in zip(bound, words, strict=True)}

    def put(self, place: int, words: Sequence[Int32Array]) -> None:
        """Take the masks of a sequence that were made elsewhere, from its first row on."""
        if self._words is None:
            self._words = host_tensor(self._shape, torch.int32, self._device)
        first = len(self._rows)
        self._rows += [place * self._num_rows + behind for behind in range(len(words))]
        self._words[first : len(self._rows)].numpy()[:] = words

    def finish(self, drafts: MaskedDrafts | None) -> TokenMask | None:
        """Return all of them; None if there are none."""
        if self._words is None:
            return None
        rows = np.array(self._rows, dtype=np.int64)
        return TokenMask(rows=rows, words=self._words[: len(rows)], drafts=drafts)


def _fill_behind(
    going: Sequence[_Sequence],
    masks: _Masks,
    verified_CK: npt.NDArray[np.int64],
    read_drafts: ReadDrafts | None,
) -> None:
    """Fill the masks of every row: behind the last token, and behind drafts that may come.

    The matchers are told the drafts, and forget them. A draft with which the output is over, or
    behind which no token can come, is not verified: it is sampled as if there were none.

    Args:
        going: all sequences.
        masks: filled.
        verified_CK: written: of each the drafts with masks behind them.
        read_drafts: None where there are none.
    """
    num_drafts = verified_CK.shape[1]
    filled = masks.fill(going, 0)
    if not num_drafts or read_drafts is None:
        return
    on_trial: list[tuple[int, _Sequence, Sequence[int]]] = [
        (row, one, read_drafts(one.place)[:num_drafts])
        for row, one in enumerate(going)
        if one.matcher.error is None
    ]
    marks = [(one.matcher, one.matcher.mark()) for _, one, _ in on_trial]
    for behind in range(num_drafts):
        on_trial = [
            (row, one, drafts)
            for row, one, drafts in on_trial
            if len(drafts) > behind and _follows(one, drafts[behind], filled)
        ]
        filled = masks.fill([one for _, one, _ in on_trial], behind + 1)
        on_trial = [trial for trial in on_trial if trial[1].matcher.error is None]
        for row, _, drafts in on_trial:
            verified_CK[row, behind] = drafts[behind]
    for matcher, mark in marks:
        matcher.go_back(mark)


def _follows(one: _Sequence, draft: int, filled: Mapping[int, Int32Array]) -> bool:
    """Tell a matcher a draft, if it may come next; whether anything can come behind it."""
    matcher = one.matcher
    if draft < 0 or (one.place in filled and not has_bit(filled[one.place], draft)):
        return False
    matcher.take(matcher.num_taken, draft)
    return not matcher.is_over and matcher.error is None


def take_sampled(item: ScheduledRequest, token_ids: Sequence[int]) -> None:
    """Tell a request's matcher what a step has sampled, before the request has it."""
    request = item.request
    if request.matcher is not None:
        request.matcher.follow(request.output_token_ids)
        request.matcher.take_each(len(request.output_token_ids), token_ids)
