"""Numbers of JSON within bounds as rules. Pure.

Numbers are compared digit by digit: among as many digits the first one that differs decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext

from grammar.schemas.ebnf import Rules, Symbols, literal

MAX_MULTIPLES = 500
"""That are written out."""
MAX_STEP = 200
"""Of multiples that are told by their remainders; each remainder is a rule."""
FRACTION_DIGITS = 15
"""That are written at most: a double holds no more."""
_PRECISION = 700
"""Digits: doubles have up to 309 before the point, or 324 behind it."""
_DIGIT = "[0-9]"
_MINUS, _POINT, _ZERO = literal("-"), literal("."), literal("0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An end of an interval."""

    value: Decimal
    is_open: bool = False
    """Whether ``value`` itself is outside."""


class Numbers:
    """Of one grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def any_number(self) -> str:
        """Any number."""
        rules = self._rules
        whole = rules.any_of([(_ZERO,), ("[1-9]", self._digits(0, None))])
        sign = rules.any_of([(), ("[+\\-]",)])
        exponent = rules.any_of([(), ("[eE]", sign, self._digits(1, 2))])
        return self._signed([(whole, self._any_fraction(), exponent)])

    def integer(self, least: int | None, most: int | None) -> str:
        """From ``least`` to ``most``; None: without an end."""
        alternatives: list[Symbols] = []
        if least is None or least < 0:
            lower = 1 if most is None else max(1, -most)
            alternatives.append((_MINUS, self._natural(lower, None if least is None else -least)))
        if (least is None or least <= 0) and (most is None or most >= 0):
            alternatives.append((_ZERO,))
        if most is None or most > 0:
            alternatives.append((self._natural(max(1, least or 1), most),))
        return self._rules.any_of(alternatives)

    def multiple(self, step: int, least: int | None, most: int | None) -> str:
        """Of ``step``, which ``can_step`` allows."""
        if least is not None and most is not None:
            first = -(-least // step) * step
            return self._rules.any_of(
                [(literal(str(value)),) for value in range(first, most + 1, step)]
            )
        name = f"multiple_{step}_"
        for rest in range(step):
            by_rest: dict[int, str] = {}
            for digit in "0123456789":
                further = (rest * 10 + int(digit)) % step
                by_rest[further] = by_rest.get(further, "") + digit
            begun = [(f"[{digits}]", f"{name}{further}") for further, digits in by_rest.items()]
            self._rules.define(f"{name}{rest}", [*begun, *([()] if rest == 0 else [])])
        begun = [(literal(str(digit)), f"{name}{digit % step}") for digit in range(1, 10)]
        first_digit = self._rules.any_of(begun)
        alternatives: list[Symbols] = [(_ZERO,)]
        if most is None:
            alternatives.append((first_digit,))
        if least is None:
            alternatives.append((_MINUS, first_digit))
        return self._rules.any_of(alternatives)

    def number(self, low: Bound | None, high: Bound | None) -> str:
        """Between ``low`` and ``high``; None: without an end."""
        if low is None and high is None:
            return self.any_number()
        zero = Bound(value=Decimal(0))
        alternatives: list[Symbols] = []
        if low is None or low.value < 0:
            above = zero if high is None or high.value >= 0 else _opposite(high)
            below = None if low is None else _opposite(low)
            # No -0: with an open end at 0 it would have to be left out again.
            above = Bound(value=above.value, is_open=above.is_open or not above.value)
            alternatives.append((_MINUS, self._magnitude(above, below)))
        if high is None or high.value > 0 or (high.value == 0 and not high.is_open):
            at_least = low if low is not None and low.value >= 0 else zero
            alternatives.append((self._magnitude(at_least, high),))
        return self._rules.any_of(alternatives)

    def _signed(self, alternatives: list[Symbols]) -> str:
        sign = self._rules.any_of([(), (_MINUS,)])
        return self._rules.any_of([(sign, *each) for each in alternatives])

    def _digits(self, least: int, most: int | None) -> str:
        return self._rules.repeated(_DIGIT, least, most)

    def _any_fraction(self) -> str:
        return self._rules.any_of([(), (_POINT, self._digits(1, FRACTION_DIGITS))])

    def _natural(self, least: int, most: int | None) -> str:
        """A whole number of at least 1."""
        rules, first = self._rules, str(least)
        if most is not None and most < least:
            return rules.never()
        if most is None:
            nines = "9" * len(first)
            longer = ("[1-9]", _DIGIT, self._digits(len(first) - 1, None))
            return rules.any_of([(self._between(first, nines),), longer])
        last = str(most)
        if len(first) == len(last):
            return self._between(first, last)
        alternatives: list[Symbols] = [
            (self._between(first, "9" * len(first)),),
            (self._between("1" + "0" * (len(last) - 1), last),),
        ]
        if len(last) - len(first) > 1:
            alternatives.append(("[1-9]", self._digits(len(first), len(last) - 2)))
        return rules.any_of(alternatives)

    def _between(self, first: str, last: str) -> str:
        """As many digits as either, from ``first`` to ``last``."""
        rules, rest = self._rules, len(first) - 1
        if not first:
            return ""
        if len(first) == 1:
            return literal(first) if first == last else f"[{first}-{last}]"
        if set(first) == {"0"} and set(last) == {"9"}:
            return rules.times(_DIGIT, len(first))
        if first[0] == last[0]:
            return rules.any_of([(literal(first[0]), self._between(first[1:], last[1:]))])
        low, high = int(first[0]), int(last[0])
        alternatives: list[Symbols] = [
            (literal(first[0]), self._between(first[1:], "9" * rest)),
            (literal(last[0]), self._between("0" * rest, last[1:])),
        ]
        if high - low > 1:
            alternatives.append((f"[{low + 1}-{high - 1}]", rules.times(_DIGIT, rest)))
        return rules.any_of(alternatives)

    def _magnitude(self, low: Bound, high: Bound | None) -> str:
        """A number without a sign, from ``low``, which is none below 0."""
        rules = self._rules
        whole, fraction = _parts(low.value)
        last, last_fraction = (None, "") if high is None else _parts(high.value)
        if last is not None and (last < whole or (high is not None and high.value < low.value)):
            return rules.never()
        if high is not None and last == whole:
            return rules.any_of([(literal(str(whole)), self._fraction_within(low, high))])
        alternatives: list[Symbols] = [
            (literal(str(whole)), self._fraction_from(fraction, is_open=low.is_open))
        ]
        middle = self._natural(whole + 1, None if last is None else last - 1)
        alternatives.append((middle, self._any_fraction()))
        if high is not None:
            up_to = self._fraction_up_to(last_fraction, is_open=high.is_open)
            alternatives.append((literal(str(last)), up_to))
        return rules.any_of(alternatives)

    def _fraction_within(self, low: Bound, high: Bound) -> str:
        """A fraction of an interval within 1: as many digits at a time."""
        alternatives: list[Symbols] = []
        whole, _ = _parts(low.value)
        most = max(len(_parts(bound.value)[1]) for bound in (low, high)) + 2
        for number in range(most + 1):
            first = _scaled(low, whole, number, ROUND_CEILING)
            last = _scaled(high, whole, number, ROUND_FLOOR)
            if first > last:
                continue
            if not number:
                alternatives.append(())
                continue
            between = self._between(str(first).zfill(number), str(last).zfill(number))
            alternatives.append((_POINT, between))
        return self._rules.any_of(alternatives)

    def _fraction_from(self, fraction: str, *, is_open: bool) -> str:
        """A point and digits that are at least 0.``fraction``; where that is 0, maybe nothing."""
        rules = self._rules
        if not fraction and not is_open:
            return self._any_fraction()
        rest = self._digits(0, FRACTION_DIGITS)
        symbol = rest
        if is_open:
            zeros = rules.repeated(_ZERO, 0, FRACTION_DIGITS)
            symbol = rules.any_of([(zeros, "[1-9]", rest)])
        for digit in reversed(fraction):
            alternatives: list[Symbols] = [(literal(digit), symbol)]
            if digit != "9":
                alternatives.append((f"[{int(digit) + 1}-9]", rest))
            symbol = rules.any_of(alternatives)
        return rules.any_of([(_POINT, symbol)])

    def _fraction_up_to(self, fraction: str, *, is_open: bool) -> str:
        """Nothing, or a point and digits that are at most 0.``fraction``."""
        rules = self._rules
        if not fraction:
            if is_open:
                return rules.never()
            return rules.any_of([(), (_POINT, rules.repeated(_ZERO, 1, FRACTION_DIGITS))])
        rest = self._digits(0, FRACTION_DIGITS)
        zeros = rules.repeated(_ZERO, 0, FRACTION_DIGITS)
        symbol, may_end = zeros, False
        if is_open:
            symbol = rules.never()
        for digit in reversed(fraction):
            further = rules.any_of([(symbol,), ()]) if may_end else symbol
            alternatives: list[Symbols] = [(literal(digit), further)]
            if digit != "0":
                alternatives.append((f"[0-{int(digit) - 1}]", rest))
            symbol, may_end = rules.any_of(alternatives), True
        return rules.any_of([(), (_POINT, symbol)])


def can_step(step: int, least: int | None, most: int | None) -> bool:
    """Whether ``Numbers.multiple`` knows the multiples of ``step`` within these bounds."""
    if least is not None and most is not None:
        return (most - least) // step <= MAX_MULTIPLES
    return step <= MAX_STEP and least in (None, 0) and most in (None, 0)


def _opposite(bound: Bound) -> Bound:
    return Bound(value=-bound.value, is_open=bound.is_open)


def _parts(value: Decimal) -> tuple[int, str]:
    """The whole part, and the digits of the fraction without zeros at the end."""
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _scaled(bound: Bound, whole: int, digits: int, rounding: str) -> int:
    """The first or last number of so many digits behind the point that is within, without it."""
    with localcontext(prec=_PRECISION):
        value = (bound.value - whole).scaleb(digits)
        found = int(value.to_integral_value(rounding))
    if bound.is_open and found == value:
        found += 1 if rounding == ROUND_CEILING else -1
    return found
