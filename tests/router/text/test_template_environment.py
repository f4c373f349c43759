"""Templates render as transformers renders them, and none goes on for ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.template import ChatTemplate, TemplateLimitError
from tests.router.conftest import TEMPLATE
from tests.router.text.templates import DEEPSEEK_V3, DEEPSEEK_V31, GLM, HERMES, LLAMA

USER = {"role": "user", "content": "hi"}
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "\u00e9 <"}}}]
TALK: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "a\n  b", "tool_calls": []},
    {"role": "user", "content": "{{ x }} {% y %}"},
]
GENERATION = (
    "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n"
    "{% generation %}{% set text = m.content %}{{ text }}{{ eos_token }}{% endgeneration %}\n"
    "  {% else %}{{ text }}{{ m.content }}{% endif %}\n{%- endfor %}"
)
FEATURES = (
    "{%- set ns = namespace(found=false, context=1) -%}"
    "{%- for m in messages if m.role != 'x' -%}{%- if loop.index0 > 1 -%}{%- break -%}{%- endif -%}"
    "{%- set ns.found = loop.last ~ loop.length -%}{{ m.content | trim | upper }}"
    "{{ m.z is defined }}"
    "{%- endfor -%}{{ ns.found }}{{ ns.context }}"
    "{{ tools | tojson }}{{ tools | tojson(indent=2, sort_keys=true) }}"
    "{{ tools | tojson(ensure_ascii=true, separators=(',', ':')) }}"
    "{{ '%s=%03d' % ('a', 7) }}{{ '{:>4}'.format('b') }}{{ ('a' * 3).replace('a', 'bc') }}"
    "{{ messages | map(attribute='role') | join('/') }}{{ [1, 2] + [3] }}"
    "{{ dict(a=1).items() | list }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 7 // 2 ** 1 }}"
    "{{ bos_token ~ 1 ~ none }}{{ sep_token is defined }}{{ dict.fromkeys('ab') }}"
    "{% macro show(a, b=2) %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}"
    "{% call show('c') %}inner{% endcall %}{{ 'a b'.split() | last }}{{ 'x\ny' | indent(2) }}"
)


@pytest.fixture(scope="module")
def theirs() -> Callable[[str], str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(source: str) -> str:
        ((text,), _) = render_jinja_template(
            [TALK], tools=TOOLS, chat_template=source, add_generation_prompt=True, **TOKENS
        )
        return str(text)

    return render


@pytest.mark.parametrize(
    "source",
    [TEMPLATE, HERMES, LLAMA, GLM, DEEPSEEK_V3, DEEPSEEK_V31, GENERATION, FEATURES],
    ids=("usual", "hermes", "llama", "glm", "deepseek_v3", "v31", "generation", "features"),
)
def test_a_template_renders_as_transformers_renders_it(
    source: str, theirs: Callable[[str], str]
) -> None:
    ours = ChatTemplate(source, TOKENS).render(TALK, tools=TOOLS)
    assert ours == theirs(source)
    assert "hi" in ours.lower()


def test_the_time_is_told() -> None:
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d|%%') }}", {}).render([USER])
    day, _, percent = text.partition("|")
    assert [len(part) for part in day.split("-")] == [4, 2, 2]
    assert percent == "%"


def test_a_loop_within_a_generation_block_can_be_left() -> None:
    source = (
        "{% for m in messages %}{% generation %}{% if loop.first %}{% continue %}{% endif %}"
        "{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render([USER, {"content": "two"}]) == "two"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(value=_JSON)
def test_json_is_read_back_and_marks_are_never_escaped(value: object) -> None:
    mark = "\ufdd0ab\ufdd1"
    template = ChatTemplate("{{ v | tojson(ensure_ascii=true) }}", {})
    text = template.render([USER], extra={"v": [value, mark, "\\ufdd0"]})
    assert json.loads(text) == [value, mark, "\\ufdd0"]
    assert mark in text


def test_json_is_ascii_where_the_template_asks_for_it() -> None:
    template = ChatTemplate("{{ v | tojson(ensure_ascii=true) }}{{ v | tojson }}", {})
    assert template.render([USER], extra={"v": "\u00e9<"}) == '"\\u00e9<""\u00e9<"'


_DOUBLED = "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = "


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**12 }}",
        "{{ [1] * 10**12 }}",
        "{{ 10 ** 1000000 }}",
        "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}",
        _DOUBLED + "ns.x + ns.x %}{% endfor %}",
        _DOUBLED + "ns.x ~ ns.x %}{% endfor %}",
        _DOUBLED + "[ns.x, ns.x] | join %}{% endfor %}",
        "{{ 'x'.center(10**11) }}",
        "{{ 'x' | center(10**11) }}",
        "{{ ('\t' * 9999).expandtabs(tabsize=10**6) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%*d' | format(10**9, 1) }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=10**10) }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
        "{{ ('a' * 99999) | replace('', 'b' * 99999) }}",
        "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
        "{{ range(99999) | list | join('x' * 99999) }}",
        "{{ ('x' * 99999).join(('a' * 99999) | list) }}",
        "{{ ('\n' * 99999) | indent(99999) }}",
        "{{ ('x ' * 99999) | wordwrap(1, wrapstring='y' * 9999) }}",
        "{{ [1] | batch(10**12, 0) | list }}",
        "{{ [1] | slice(10**12) | list }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_what_makes_too_much_is_refused_before_it_is_made(source: str) -> None:
    with pytest.raises(TemplateLimitError, match=r"chat template: (it|the format) .*Fix: "):
        ChatTemplate(source, {}).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% for i in r recursive %}{{ loop(r) if loop.depth < 9 }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ r | map('string') | map('batch', 1) | map('list') | list }}",
        "{{ (r | list * 99) | select('in', r | list) | list }}",
    ],
)
def test_what_goes_on_for_ever_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.text.template_environment.MAX_SECONDS", 0.05)
    source = "{% set r = range(99999) %}" + source
    with pytest.raises(TemplateLimitError, match=r"takes more than 0\.05 s of CPU time"):
        ChatTemplate(source, {}).render([USER])
