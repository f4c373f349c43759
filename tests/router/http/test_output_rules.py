"""The grammars of a request have no more time than the request itself."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from router.http.openai.output_rules import OutputRules
from router.model import ServedModel
from router.text.grammar.compilers import Compilers
from router.text.grammar.forms import text
from runtime.budget import Budget, BudgetKind
from runtime.errors import DeadlineExceededError


class Formats:
    """Of a model that knows no reasoning."""

    reasoning = None
    marks = ()


class Model:
    formats = Formats()


class Busy:
    """Compilers whose turn never comes."""

    async def compile(self, forms: object, **options: object) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError(forms, options)


async def test_a_request_waits_for_its_grammar_within_its_own_time() -> None:
    rules = OutputRules(
        param="response_format", form=text("hi"), model=cast(ServedModel, Model()), reasons=False
    )
    now = asyncio.get_running_loop().time()
    limit = Budget.start(BudgetKind.FIRST_TOKEN, 0.05, now, "router.first_token_timeout_s")
    with pytest.raises(DeadlineExceededError, match=r"first_token_timeout_s.*response_format"):
        await rules.compile(cast(Compilers, Busy()), limit)
