"""Chat templates in the manners of model families: how each writes calls, results, reasoning."""

from __future__ import annotations

from router.text.calls.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)

_HEAD = "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


def _template(
    call: str, *, content: str = "m.content or ''", before: str = "", after: str = ""
) -> str:
    """``call``: what is written of ``c``, a call's function."""
    return (
        _HEAD + "{% for m in messages %}"
        "{% if m.role == 'user' %}<user>{{ m.content }}"
        "{% elif m.role == 'tool' %}<user>[{{ m.content }}]"
        "{% elif m.role == 'assistant' %}<assistant>"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ " + content + " }}"
        "{% for call in m.tool_calls or [] %}{% set c = call.function %}"
        + before
        + call
        + after
        + "{% endfor %}{{ eos_token }}"
        "{% else %}{{ raise_exception('no role ' + m.role) }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>"
        "{% if thinking is defined %}{{ '<think>' if thinking else '</think>' }}{% endif %}"
        "{% endif %}"
    )


HERMES = _template(
    '<tool_call>\n{"name": "{{ c.name }}", "arguments": '
    "{{ c.arguments if c.arguments is string else c.arguments | tojson }}}\n</tool_call>"
)
WITH_SYSTEM = HERMES.replace(
    "{% if m.role == 'user'",
    "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user'",
    1,
)
LLAMA = _template('{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}')
GLM = _template(
    "\n<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson(ensure_ascii=False) }}</arg_value>\n"
    "{% endfor %}</tool_call>",
    content="m.content",
)
DEEPSEEK_V3 = _template(
    CALL_BEGIN
    + "{{ call.type }}"
    + SEPARATOR
    + "{{ c.name }}\n```json\n{{ c.arguments }}\n```"
    + CALL_END,
    before="{% if loop.first %}" + CALLS_BEGIN + "{% endif %}",
    after="{% if loop.last %}" + CALLS_END + "{% endif %}",
)
DEEPSEEK_V31 = _template(
    CALL_BEGIN + "{{ c.name }}" + SEPARATOR + "{{ c.arguments + '' }}" + CALL_END,
    before="{% if loop.first %}" + CALLS_BEGIN + "{% endif %}",
    after="{% if loop.last %}" + CALLS_END + "{% endif %}",
)
QUIET = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>"
"""Of a model that does not reason."""
STRANGE = _template("{{ c.name }}({{ c.arguments | tojson }})")
FORGETFUL = "{% for m in messages %}{{ m.content }}{% endfor %}"
