"""Refusals under the names that a client knows, where its request was translated into another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from router.errors import RequestError


@contextlib.contextmanager
def errors_named_by(names_of: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Let a refusal name the field that the client sent instead of what it was translated to.

    ``names_of`` gives the client's names by ours: of fields, of items of lists, of parts of either.
    """
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            names = names_of()
            ours = _longest_within(error.param, names)
            error.param = client_param(error.param, names)
            if error.message.startswith(ours):
                error.message = names.get(ours, ours) + error.message.removeprefix(ours)
        raise


def client_param(param: str, names: Mapping[str, str]) -> str:
    """The client's name of what is called ``param`` here."""
    ours = _longest_within(param, names)
    return names.get(ours, ours) + param.removeprefix(ours)


def _longest_within(param: str, names: Mapping[str, str]) -> str:
    """The longest of ``names`` that is ``param`` or its beginning; empty: none is."""
    found = [name for name in names if param == name or param.startswith((f"{name}.", f"{name}["))]
    return max(found, key=len, default="")


def turn_params(origins: Sequence[str], *, beginning: str, call_id: str) -> dict[str, str]:
    """The names of the messages of a conversation that was translated, one by one.

    Args:
        origins: of the turns, where the client sent each.
        beginning: the field of what stands before the turns; empty: nothing does.
        call_id: how the client calls the ``tool_call_id`` of a turn.
    """
    places = [beginning, *origins] if beginning else origins
    turns = {f"messages[{number}]": place for number, place in enumerate(places)}
    results = {f"{ours}.tool_call_id": f"{place}.{call_id}" for ours, place in turns.items()}
    return {**turns, **results}
