"""From a checked request to prompts of token ids. Pure, for threads: long texts take seconds.

First ``check_*`` refuses what can never fit, by counting characters; nothing is encoded for that.
"""

from __future__ import annotations

from collections.abc import Callable

from router.errors import RequestError
from router.http.openai.conversation import (
    offered_tools,
    start_of_output,
    template_for,
    template_messages,
)
from router.http.openai.params import check_prompt_logprobs, check_token_ids, too_long
from router.http.openai.response import Prompt
from router.http.openai.schema import ChatRequest, CompletionRequest
from router.http.openai.unsupported import refuse_unread, template_variables
from router.model import ModelLimits, ServedModel
from router.text.control_text import TooManySpellingsError
from router.text.reasoning import Start

USUAL_CHARS_PER_TOKEN = 6
"""Few texts have more."""
CUT_TOKENS = 64
"""What a cut in the middle of a text may add to its tokens, with room to spare."""

Abandoned = Callable[[], bool]


def check_chat(body: ChatRequest, model: ServedModel, limits: ModelLimits) -> None:
    """Raise RequestError where the messages can be no prompt of this model."""
    if model.chat_template is None:
        raise RequestError(
            f"the model {model.name!r} has no chat template. Fix: use /v1/completions"
        )
    refuse_unread(body, model)
    _check_chars(sum(len(m["content"] or "") for m in body.messages), model, limits, "messages")


def check_completion(body: CompletionRequest, model: ServedModel, limits: ModelLimits) -> None:
    """Raise RequestError where a prompt cannot be one of this model."""
    for item in body.prompt:
        if isinstance(item, str):
            _check_chars(len(item), model, limits, "prompt")
        else:
            if len(item) >= limits.max_model_len:
                raise too_long("prompt", len(item), limits)
            check_token_ids(item, limits, param="prompt")


def chat_prompt(
    body: ChatRequest, model: ServedModel, limits: ModelLimits, is_abandoned: Abandoned
) -> Prompt:
    """The messages as the chat template writes them."""
    template = template_for(body, model)
    assert template is not None
    control = model.control_text
    most = limits.max_model_len  # each is a token at least
    try:
        messages = control.mark_messages(template_messages(body, model.call_history), most=most)
    except TooManySpellingsError as error:
        raise too_long("messages", most + 1, limits, at_least=True) from error
    text = template.render(
        messages,
        tools=control.mark(offered_tools(body)) or None,
        continue_final_message=body.continues_final,
        extra=control.mark(template_variables(body, template.variables)),
    )
    start = start_of_output(body, model, text)
    # The template has written the special tokens, and only it may.
    parts = [part for part in control.parts(text) if part]
    text = "".join(parts)
    _check_chars(len(text), model, limits, "messages")
    if len(parts) > most:
        raise too_long("messages", len(parts), limits, at_least=True)
    for part in parts:
        _check_beginning(part, model, limits, "messages")
    encoded = model.tokenizer.encode_all(parts, add_special_tokens=False, is_abandoned=is_abandoned)
    token_ids = [token_id for ids in encoded for token_id in ids]
    check_prompt_logprobs(body, [len(token_ids)])
    return Prompt(
        token_ids=token_ids,
        text=text,
        start=Start.CLOSED if body.separate_reasoning is False else start,
        model_start=start,
    )


def completion_prompts(
    body: CompletionRequest, model: ServedModel, limits: ModelLimits, is_abandoned: Abandoned
) -> list[Prompt]:
    """The prompts as they were sent, each as text or as ids."""
    # An empty text stays empty, also where the tokenizer would add a token of its own.
    texts = [item for item in body.prompt if isinstance(item, str) and item]
    for text in texts:
        _check_beginning(text, model, limits, "prompt")
    encoded = iter(
        model.tokenizer.encode_all(
            texts,
            add_special_tokens=body.add_special_tokens is not False,
            is_abandoned=is_abandoned,
        )
    )
    if is_abandoned():
        return []
    prompts = [
        Prompt(token_ids=next(encoded) if item else [], text=item)
        if isinstance(item, str)
        else Prompt(token_ids=item)
        for item in body.prompt
    ]
    check_prompt_logprobs(body, [len(prompt.token_ids) for prompt in prompts])
    return prompts


def _check_chars(num_chars: int, model: ServedModel, limits: ModelLimits, param: str) -> None:
    most = model.tokenizer.most_chars(limits.max_model_len)
    if num_chars > most:
        raise RequestError(
            f"{param} has {num_chars} characters, but the model's context holds "
            f"{limits.max_model_len} tokens for prompt and output together, never more than "
            f"{most} characters. Fix: shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _check_beginning(text: str, model: ServedModel, limits: ModelLimits, param: str) -> None:
    """Refuse a text of which a beginning is too long already.

    The library lets nothing else run while it frees what it made of a text: half a second for one
    of many times the context.
    """
    num_chars = USUAL_CHARS_PER_TOKEN * limits.max_model_len
    if len(text) <= num_chars:
        return
    num_tokens = model.tokenizer.count(text[:num_chars]) - CUT_TOKENS
    if num_tokens >= limits.max_model_len:
        raise too_long(param, num_tokens, limits, at_least=True)
