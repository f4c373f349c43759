"""How likely drafts are to be right, of each request: an estimate from what became of those before.

Pure. A draft counts only where all before it have counted, so what is estimated is, for each place,
the share of drafts that are right behind right ones; their product is the chance that a draft gives
a token (its survival). Requests differ (code, prose, temperature), and so do their parts: old
evidence fades. A new request is taken to be like the requests of this rank have been of late.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.request import Request

FIRST_GUESS = 0.8
"""Share of drafts that are right behind right ones before any was verified: a layer that was
trained with its model reaches 0.85 to 0.9 in the first place, and less behind it."""
FADES = 0.96
"""Weight that evidence of a request keeps from one step to the next."""
RANK_FADES = 0.9995
"""The same of all requests together, from one verified step of a request to the next."""
PRIOR_STEPS = 8.0
"""Steps of evidence that what is known of other requests weighs."""


@dataclass(slots=True)
class _Places:
    """Evidence by place of a draft: right ones, and all that were looked at; fading."""

    right: list[float]
    seen: list[float]

    @classmethod
    def none(cls, count: int) -> _Places:
        return cls(right=[0.0] * count, seen=[0.0] * count)

    def add(self, num_verified: int, num_right: int, fades: float) -> None:
        for place in range(min(num_verified, num_right + 1)):
            self.right[place] = self.right[place] * fades + (place < num_right)
            self.seen[place] = self.seen[place] * fades + 1.0

    def shares(self, prior: Sequence[float], weight: float) -> list[float]:
        return [
            (right + guess * weight) / (seen + weight)
            for right, seen, guess in zip(self.right, self.seen, prior, strict=True)
        ]


@dataclass(slots=True)
class _OfRequest:
    places: _Places
    expected: tuple[float, ...] = ()
    """Tokens of a step by its number of drafts; empty if they are to be computed."""


@dataclass(slots=True)
class DraftSurvival:
    """The estimates of one rank. Used by one thread.

    Attributes:
        max_drafts: most of a step.
    """

    max_drafts: int
    _all: _Places = field(init=False)
    _requests: dict[Request, _OfRequest] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._all = _Places.none(self.max_drafts)

    def saw(self, request: Request, num_verified: int, num_right: int) -> None:
        """A step verified drafts of a request.

        Args:
            request: whose.
            num_verified: drafts that it had, from the first one.
            num_right: how many of them counted.
        """
        assert 0 <= num_right <= num_verified <= self.max_drafts, (num_right, num_verified)
        if not num_verified:
            return
        self._all.add(num_verified, num_right, RANK_FADES)
        known = self._of(request)
        known.places.add(num_verified, num_right, FADES)
        known.expected = ()

    def expected(self, requests: Iterable[Request]) -> list[float]:
        """Return the tokens to be expected of a step with these, by its number of drafts from 0.

        Every request gives one token at least; ascending therefore. What is known of requests that
        are not among these is forgotten, once it is much.
        """
        sums, prior = [0.0] * (self.max_drafts + 1), self._prior()
        count = 0
        running = set()
        for request in requests:
            count += 1
            running.add(request)
            known = self._of(request)
            if not known.expected:
                known.expected = _tokens(known.places.shares(prior, PRIOR_STEPS))
            for num_drafts, tokens in enumerate(known.expected):
                sums[num_drafts] += tokens
        if len(self._requests) > 2 * count + 64:
            self._requests = {one: known for one, known in self._requests.items() if one in running}
        return sums

    def _of(self, request: Request) -> _OfRequest:
        known = self._requests.get(request)
        if known is None:
            known = self._requests[request] = _OfRequest(_Places.none(self.max_drafts))
        return known

    def _prior(self) -> list[float]:
        return self._all.shares([FIRST_GUESS] * self.max_drafts, PRIOR_STEPS)


def _tokens(shares: Sequence[float]) -> tuple[float, ...]:
    """Return 1, 1 + p1, 1 + p1 + p1 p2, and so on."""
    tokens, survival = [1.0], 1.0
    for share in shares:
        survival *= share
        tokens.append(tokens[-1] + survival)
    return tuple(tokens)
