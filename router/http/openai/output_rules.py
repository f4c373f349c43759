"""What holds of a request's output: the form of its answer, calls that have to be, a budget.

Pure but for ``CompiledRules``' making, which waits for grammars. Which of the grammars applies is
known once the template has written the prompt: the answer's alone, the same behind the mark that
ends an open reasoning, or one in which the model may reason first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grammar.schemas.schema import Canonical, canonical, objects_of
from grammar.schemas.schema_errors import SchemaError
from router.errors import RequestError
from router.http.openai.conversation import most_calls, offered_tools
from router.http.openai.output_forms import form_of
from router.http.openai.schema import ChatRequest, GenerationRequest
from router.http.openai.schema_forms import refused
from router.model import ServedModel
from router.text.calls.forms import CallShape, ToolForm, written_by_key
from router.text.grammar.compilers import Compilers
from router.text.grammar.forms import (
    Form,
    MarkForms,
    anything,
    behind_reasoning,
    is_guarded,
    one_of,
    with_reasoning,
)
from router.text.lanes import Payer
from router.text.reasoning import Start
from runtime.budget import Budget
from runtime.sampling import OutputConstraint

_ANY_OBJECT = canonical({"type": "object"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """Of one request, before its grammars are made."""

    param: str
    """The field that says most of it."""
    form: Form | None
    """Of the answer; None: any."""
    max_reasoning_tokens: int = 0
    """0: as many as it likes."""
    model: ServedModel
    reasons: bool
    """Whether the model may reason."""
    is_guarded: bool = False
    """See `forms.is_guarded`."""
    ignored: tuple[str, ...] = ()
    """Fields that no rule was made of."""

    def left_out(self) -> list[str]:
        """Fields that are not followed to the letter, as the client knows them."""
        return [*self.ignored, *([] if self.form is None else self.form.left_out)]

    def forms(self) -> list[Form]:
        """Those that become grammars: the answer, behind the reasoning, with it."""
        reasoning, marks = self.model.formats.reasoning, MarkForms(self.model.formats.marks)
        if reasoning is None or not self.reasons:
            return [] if self.form is None else [self.form]
        budget = self.max_reasoning_tokens
        if self.form is None and not budget:
            return []
        if self.form is None:
            return [with_reasoning(anything(reasoning, marks), reasoning, marks, max_tokens=budget)]
        return [
            self.form,
            behind_reasoning(self.form),
            with_reasoning(self.form, reasoning, marks, max_tokens=budget),
        ]

    async def compile(
        self, compilers: Compilers, limit: Budget, payer: Payer | None = None
    ) -> CompiledRules:
        """Make the grammars, for which ``payer`` is asked where they are new.

        Raises:
            RequestError: there can be none.
            TooManyRequestsError: too many others wait for theirs.
            DeadlineExceededError: ``limit``, on the loop's clock, is over.
        """
        forms = self.forms()
        if not forms:
            return CompiledRules(rules=self, grammars=())
        try:
            async with asyncio.timeout_at(limit.until):
                grammars = await compilers.compile(
                    forms, param=self.param, is_guarded=self.is_guarded, payer=payer
                )
        except TimeoutError as error:
            raise limit.error(f"a grammar for {self.param} was being compiled") from error
        return CompiledRules(rules=self, grammars=grammars)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRules:
    """The rules of one request, with the grammars of its forms."""

    rules: OutputRules
    grammars: Sequence[str]

    def constraint(self, start: Start) -> OutputConstraint | None:
        """For an output of which the prompt says where it begins; None: there is none."""
        rules, grammars = self.rules, self.grammars
        if not grammars:
            return None
        bound = partial(OutputConstraint, is_guarded=rules.is_guarded)
        if not rules.reasons or start is Start.CLOSED:
            return None if rules.form is None else bound(grammar=grammars[0])
        if start is Start.UNDECIDED:
            return bound(grammar=grammars[-1])
        reasoning = rules.model.formats.reasoning
        assert reasoning is not None
        return bound(
            grammar="" if rules.form is None else grammars[1],
            starts_after=tuple(_ids_of(reasoning.closing, rules.model)),
            max_tokens_before=rules.max_reasoning_tokens,
        )


def rules_of(request: GenerationRequest, model: ServedModel) -> OutputRules | None:
    """What holds of the output of ``request``; None: nothing does.

    Raises:
        RequestError: it cannot hold; names the field.
    """
    asked = form_of(request)
    param, form = asked or ("", None)
    reasons = isinstance(request, ChatRequest) and model.formats.reasoning is not None
    budget, ignored = 0, tuple[str, ...]()
    if isinstance(request, ChatRequest):
        budget = _reasoning_budget(request, model)
        if offered_tools(request) and model.formats.calls is not None:
            param, form, ignored = _with_calls(request, model, param, form)
    if form is None and _asks_for_strict(request):
        ignored = ("tools.function.strict",)
    if form is None and not budget and not ignored:
        return None
    return OutputRules(
        param=param or "max_reasoning_tokens",
        form=form,
        max_reasoning_tokens=budget,
        model=model,
        reasons=reasons,
        is_guarded=is_guarded(None if asked is None else asked[1], form),
        ignored=ignored,
    )


def _ids_of(mark: str, model: ServedModel) -> list[int]:
    """The tokens that ``mark`` is."""
    token = MarkForms(model.formats.marks).token_of(mark)
    return [token] if token is not None else model.tokenizer.encode(mark, add_special_tokens=False)


def _asks_for_strict(request: GenerationRequest) -> bool:
    """Whether arguments of a call, which need not be, have to follow their tool's schema."""
    return isinstance(request, ChatRequest) and any(
        tool["function"].get("strict") for tool in offered_tools(request)
    )


def _reasoning_budget(request: ChatRequest, model: ServedModel) -> int:
    named = (
        ("max_reasoning_tokens", request.max_reasoning_tokens),
        ("thinking_token_budget", request.thinking_token_budget),
    )
    given = [(name, value) for name, value in named if value is not None]
    if len(given) > 1:
        problem = f"{given[0][0]} and {given[1][0]} say the same. Fix: send one of them"
        raise RequestError(problem, param=given[1][0])
    for name, value in given:
        if model.formats.reasoning is None:
            raise RequestError(
                f"{name} = {value} is not supported by this server. "
                "Fix: leave it out: the model has no known reasoning",
                param=name,
                code="unsupported_value",
            )
        if not 1 <= value < 2**31:
            fix = "an integer from 1 on; a switch of the template's turns reasoning off"
            raise RequestError(f"{name} = {value} is out of range. Fix: send {fix}", param=name)
        return value
    return 0


def _with_calls(
    request: ChatRequest, model: ServedModel, param: str, form: Form | None
) -> tuple[str, Form | None, tuple[str, ...]]:
    """The rules of an answer that may call, or has to; and what of tools is not followed."""
    calls, marks = model.formats.calls, MarkForms(model.formats.marks)
    assert calls is not None
    named, allowed = request.named_tool, request.allowed_tools
    only = None if allowed is None else allowed.names
    if named is not None:
        only = frozenset((named,))
    has_to = request.has_to_call
    if has_to and form is not None and param != "response_format":
        raise RequestError(
            f"{param} and tool_choice each say what the answer has to look like. "
            "Fix: send one of them",
            param="tool_choice",
        )
    only_one = most_calls(request) == 1
    if form is None and not has_to and allowed is None and not _asks_for_strict(request):
        return param, None, ()
    all_schemas = has_to or form is not None
    tools = _tool_forms(request, calls.shape, only=only, all_schemas=all_schemas)
    ignored = tuple(name for tool in tools for name in tool.left_out)
    try:
        if has_to:
            return "tool_choice", calls.shape.calls(tools, marks, only_one=only_one), ignored
        if form is not None:
            called = calls.shape.calls(tools, marks, only_one=only_one)
            return param, one_of([called, form]), ignored
        reasoning = model.formats.reasoning
        without = () if reasoning is None else (reasoning.opening,)
        form = calls.shape.within_text(tools, marks, without=without)
        if form is None and allowed is not None:
            raise RequestError(
                "tool_choice allows some of the tools, and this model's calls begin as a text may. "
                'Fix: send the mode "required", or only those tools',
                param="tool_choice",
                code="unsupported_value",
            )
        return "tools" if allowed is None else "tool_choice", form, ignored
    except SchemaError as error:
        raise refused(error, "tools") from error


def _tool_forms(
    request: ChatRequest, shape: CallShape, *, only: frozenset[str] | None, all_schemas: bool
) -> list[ToolForm]:
    """Of the tools that may be called; ``all_schemas``: also of those that are not strict."""
    tools = []
    for number, tool in enumerate(offered_tools(request)):
        function = tool["function"]
        if only is not None and function["name"] not in only:
            continue
        param = f"tools[{number}].function.parameters"
        is_strict = function.get("strict") is True
        arguments = _ANY_OBJECT
        if is_strict or all_schemas:
            arguments = _arguments(function, param, shape, is_strict=is_strict)
        tools.append(ToolForm(name=function["name"], param=param, arguments=arguments))
    return tools


def _arguments(
    function: dict[str, Any], param: str, shape: CallShape, *, is_strict: bool
) -> Canonical:
    """The schema of a tool's arguments, which are an object whatever else it says."""
    try:
        schema = function.get("parameters") or {}
        found = objects_of(canonical(schema, closed=is_strict, lenient=not is_strict))
        return written_by_key(found, lenient=not is_strict) if shape.by_key else found
    except SchemaError as error:
        raise refused(error, param) from error
