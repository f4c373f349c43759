"""Chat examples and stand-alone functions made from documented functions."""

import ast

import pytest

from tools.training.conversation import exchanges, functions
from tools.training.corpus import Document

pytestmark = pytest.mark.nightly

FUNCTION = '''    def method_{index}(self, value={index}):
        """Return the value number {index}.

        More detail.
        """
        return value
'''
SOURCE = "class Holder:\n" + "\n".join(FUNCTION.format(index=index) for index in range(60))
DOCUMENT = Document(name="holder.py", text=SOURCE)


def test_an_answer_is_the_function_and_the_question_its_docstring() -> None:
    made = list(exchanges(DOCUMENT))
    assert 8 <= len(made) <= 30
    for exchange in made:
        tree = ast.parse(exchange.answer)
        assert isinstance(tree.body[0], ast.FunctionDef)
        assert "Return the value number" in exchange.question
        assert "More detail" not in exchange.question
    assert len({exchange.question[:8] for exchange in made}) > 1


def test_a_function_is_asked_for_or_stands_alone_but_not_both() -> None:
    asked = {exchange.answer for exchange in exchanges(DOCUMENT)}
    alone = {text.removesuffix("\n") for text in functions(DOCUMENT)}
    assert alone
    assert not asked & alone
    assert all(text.startswith("def ") for text in alone)


def test_the_choice_is_the_same_every_time() -> None:
    assert list(exchanges(DOCUMENT)) == list(exchanges(DOCUMENT))


def test_undocumented_long_or_broken_source_gives_nothing() -> None:
    bare = Document(name="a.py", text="def f(x):\n    x += 1\n    return x\n")
    body = "\n".join(f"    x += {index}" for index in range(60))
    long = Document(name="b.py", text=f'def f(x):\n    """Add."""\n{body}\n')
    broken = Document(name="c.py", text="def f(:\n")
    for document in (bare, long, broken):
        assert not list(exchanges(document))
        assert not list(functions(document))
