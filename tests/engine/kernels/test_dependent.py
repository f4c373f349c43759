"""The wait comes first in a kernel's source, and only launches that may wait are told to."""

import ast
import threading

import pytest

from engine.formats.deep_gemm import _in_turn
from engine.kernels.fused.dependent import (
    WAIT,
    break_chain,
    dependent_launches,
    joins_chain,
    ordinary_launches,
    with_wait,
)

PLAIN = """def _add(
    x, y,
    B: tl.constexpr,
):  # fmt: skip
    # why
    row = tl.program_id(0)
    if B:
        return
    tl.store(y + row, tl.load(x + row))
"""
DOCUMENTED = PLAIN.replace("    # why", '    """Add rows.\n\n    Twice.\n    """')


@pytest.mark.parametrize("source", [PLAIN, DOCUMENTED])
def test_a_kernel_waits_before_it_does_anything(source: str) -> None:
    (before,), (after,) = (ast.parse(text).body for text in (source, with_wait(source)))
    assert isinstance(before, ast.FunctionDef)
    assert isinstance(after, ast.FunctionDef)
    skipped = int(ast.get_docstring(before) is not None)
    expected = [ast.dump(ast.parse(line).body[0]) for line in WAIT]
    body = [ast.dump(statement) for statement in after.body]
    assert body[skipped : skipped + 2] == expected
    assert body[:skipped] + body[skipped + 2 :] == [ast.dump(item) for item in before.body]
    assert ast.dump(after.args) == ast.dump(before.args)


def test_a_kernel_without_a_line_for_the_wait_is_refused() -> None:
    with pytest.raises(ValueError, match="the body of _add does not begin on a line of its own"):
        with_wait("def _add(x, y): tl.store(y, tl.load(x))")


def test_launches_depend_on_others_inside_of_the_block_alone() -> None:
    assert not joins_chain()
    with dependent_launches():
        assert joins_chain()
        with dependent_launches():
            assert joins_chain()
        assert joins_chain()
    assert not joins_chain()
    break_chain()  # of no consequence
    assert not joins_chain()


def test_the_launch_behind_a_kernel_that_may_not_wait_is_an_ordinary_one() -> None:
    with dependent_launches():
        break_chain()
        assert [joins_chain() for _ in range(3)] == [False, True, True]


def test_another_thread_launches_as_ever() -> None:
    seen: list[bool] = []
    with dependent_launches():
        thread = threading.Thread(target=lambda: seen.append(joins_chain()))
        thread.start()
        thread.join()
    assert seen == [False]


class Library:
    """A matrix library that notes how each product was launched."""

    def __init__(self) -> None:
        self.is_dependent, self.launched = False, list[bool]()

    def get_pdl(self) -> bool:
        return self.is_dependent

    def set_pdl(self, is_dependent: bool) -> None:
        self.is_dependent = is_dependent

    def multiply(self) -> None:
        with _in_turn(self):  # type: ignore[arg-type]
            self.launched.append(self.is_dependent)


def test_a_product_with_two_kernels_to_wait_for_is_launched_as_usual() -> None:
    library = Library()
    library.multiply()
    with dependent_launches():
        library.is_dependent = True
        library.multiply()
        break_chain()
        library.multiply()
        library.multiply()
        with ordinary_launches():
            break_chain()
            library.multiply()
    assert library.launched == [False, True, False, True, True]
    assert library.is_dependent


def test_a_product_mends_the_chain() -> None:
    library = Library()
    with dependent_launches():
        library.is_dependent = True
        break_chain()
        library.multiply()
        assert joins_chain()
