"""Chains of operations alone and in turns: results, order, and who is never overtaken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.operations import Operations, interleave, run


def chain(name: str, num_yields: int, log: list[tuple[str, int]]) -> Operations[str]:
    for place in range(num_yields):
        log.append((name, place))
        yield
    log.append((name, num_yields))
    return f"{name} is done"


def test_alone() -> None:
    log: list[tuple[str, int]] = []
    assert run(chain("a", 2, log)) == "a is done"
    assert log == [("a", 0), ("a", 1), ("a", 2)]


def test_what_is_done_meanwhile_is_done_at_each_yield() -> None:
    log: list[tuple[str, int]] = []
    calls: list[int] = []
    run(chain("a", 3, log), lambda: calls.append(len(log)))
    assert calls == [1, 2, 3]
    log.clear()
    calls.clear()
    interleave(chain("a", 2, log), chain("b", 2, log), lag=1, meanwhile=lambda: calls.append(1))
    assert len(calls) >= 4


def test_nested() -> None:
    def outer(log: list[tuple[str, int]]) -> Operations[int]:
        first = yield from chain("a", 1, log)
        second = yield from chain("b", 0, log)
        return len(first) + len(second)

    assert run(outer([])) == 18


def test_in_turns() -> None:
    log: list[tuple[str, int]] = []
    results = interleave(chain("a", 2, log), chain("b", 2, log), lag=1)
    assert results == ("a is done", "b is done")
    assert log == [("a", 0), ("a", 1), ("b", 0), ("a", 2), ("b", 1), ("b", 2)]


@given(first=st.integers(0, 6), second=st.integers(0, 6), lag=st.integers(0, 8))
def test_everything_runs_once_and_the_first_stays_ahead(first: int, second: int, lag: int) -> None:
    log: list[tuple[str, int]] = []
    interleave(chain("a", first, log), chain("b", second, log), lag=lag)
    for name, num_yields in (("a", first), ("b", second)):
        assert [place for who, place in log if who == name] == list(range(num_yields + 1))
    done = -1
    for who, place in log:
        if who == "a":
            done = place
        else:
            assert done >= min(place + lag, first)


def test_an_error_ends_both() -> None:
    def broken() -> Operations[str]:
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        interleave(broken(), chain("b", 5, []), lag=0)
