"""Values of the clients' own request types, made from the types alone.

A walk goes down from a type's fields to the fields of what they hold. Each value is the smallest
that its type allows, with one field more than it needs: the one that is asked about.
"""

from __future__ import annotations

import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

Place = Callable[[object], dict[str, Any]]
"""The body that holds a value at one place."""
Ask = Callable[[str, dict[str, Any]], Awaitable[bool]]
"""Sends the body that a path is asked about with; returns whether to go on below the path."""
MAX_LITERALS = 3


class Walk:
    """Over one request type."""

    def __init__(self, samples: Mapping[str, object], around: Mapping[str, Callable[[Any], Any]]):
        """How to make bodies that can be answered.

        Args:
            samples: by path or by an object's type, fields beside those that are made.
            around: puts a list's other items around those that are asked about, by field.
        """
        self._samples = samples
        self._around = around

    async def fields(self, kind: Any, needed: Mapping[str, object], ask: Ask) -> None:
        """Ask about each field of ``kind``, on top of ``needed``."""
        for name, hint in get_type_hints(kind).items():

            def place(value: object, name: str = name) -> dict[str, Any]:
                return {**needed, name: self._around.get(name, lambda item: item)(value)}

            await self._below(name, hint, place, ask)

    async def _below(self, path: str, hint: Any, place: Place, ask: Ask) -> None:
        for member in members(hint):
            value = self._value(path, member)
            # An empty object says nothing; what might be in it is asked about all the same.
            if value != {} and not await ask(path, place(value)):
                continue
            item = item_of(member)
            if item is not None:
                await self._below(path, item, lambda value: place([value]), ask)
            elif is_object(member):
                assert isinstance(value, dict)
                for name, inner in get_type_hints(member).items():

                    def within(new: object, name: str = name, whole: Any = value) -> dict[str, Any]:
                        return place({**whole, name: new})

                    await self._below(f"{path}.{name}", inner, within, ask)

    def _value(self, path: str, kind: Any) -> object:
        """The smallest value of ``kind``."""
        if is_object(kind):
            made = {
                name: self._value(f"{path}.{name}", next(members(hint)))
                for name, hint in get_type_hints(kind).items()
                if name in needed_fields(kind)
            }
            sample = self._samples.get(kind.__name__, self._samples.get(path))
            return {**made, **sample} if isinstance(sample, dict) else made
        if path in self._samples:
            return self._samples[path]
        item = item_of(kind)
        if item is not None:
            return [self._value(path, next(members(item)))]
        if get_origin(kind) is Literal:
            return get_args(kind)[0]
        if get_origin(kind) in (dict, Mapping) or kind is dict:
            return {"x": "x"}
        return {int: 1, float: 0.5, bool: True}.get(kind, "x")


def members(hint: Any) -> Iterator[Any]:
    """The types that a hint allows; each of a few literals by itself."""
    origin = get_origin(hint)
    if origin in (typing.Annotated, Required, NotRequired):
        yield from members(get_args(hint)[0])
    elif origin is Union or origin.__class__.__name__ == "UnionType":
        for member in get_args(hint):
            yield from members(member)
    elif origin is Literal:
        for value in get_args(hint)[:MAX_LITERALS]:
            yield Literal[value]
    elif hint is not type(None):
        yield hint


def item_of(kind: Any) -> Any:
    """What a list's type is a list of; None: it is no list."""
    if get_origin(kind) in (list, Iterable, Sequence, typing.Iterable, typing.Sequence):
        return get_args(kind)[0]
    return None


def needed_fields(kind: Any) -> set[str]:
    """Those without which ``kind`` is none; its annotations are texts, which hide some of them."""
    marks = {n: get_origin(h) for n, h in get_type_hints(kind, include_extras=True).items()}
    of_class = {name for name in kind.__required_keys__ if marks[name] is not NotRequired}
    return of_class | {name for name, mark in marks.items() if mark is Required}


def is_object(kind: Any) -> bool:
    """Whether ``kind`` is an object with named fields."""
    return hasattr(kind, "__required_keys__")
