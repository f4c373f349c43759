"""Templates render as the checkpoint means them and can do nothing else."""

from __future__ import annotations

import pytest

from router.errors import RequestError
from router.model import load_served_model
from router.text.template import ChatTemplate
from runtime.config import ModelSection
from runtime.errors import ConfigError
from tests.router.conftest import TEMPLATE

TOKENS = {"bos_token": "<bos>"}
USER = {"role": "user", "content": "hi"}


def test_messages_are_rendered() -> None:
    template = ChatTemplate(TEMPLATE, TOKENS)
    assert template.render([USER]) == "<bos><user>hi<assistant>"
    tail = {"role": "assistant", "content": "He said "}
    text = template.render([USER, tail], continue_final_message=True)
    assert text == "<bos><user>hi<assistant>He said"
    with pytest.raises(RequestError, match="no content"):
        template.render([USER, {"role": "assistant", "content": ""}], continue_final_message=True)


@pytest.mark.parametrize("content", ["e", "eos", ">", "assistant", "<eos>"])
def test_a_continued_message_ends_where_its_content_does(content: str) -> None:
    """Also where the template writes the same letters behind it."""
    template = ChatTemplate(TEMPLATE, TOKENS)
    tail = {"role": "assistant", "content": content}
    text = template.render([USER, tail], continue_final_message=True)
    assert text == f"<bos><user>hi<assistant>{content}"


def test_a_final_message_that_the_template_leaves_out_is_refused() -> None:
    template = ChatTemplate("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", TOKENS)
    with pytest.raises(RequestError, match="not written"):
        template.render([USER, {"role": "assistant", "content": "x"}], continue_final_message=True)


def test_extra_variables_and_filters() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.content == 'x' %}{% continue %}{% endif %}"
        "{{ m.content | tojson }}{% endfor %}{{ thinking }}{{ tools }}",
        TOKENS,
    )
    text = template.render([{"content": "x"}, {"content": "\u00f6"}], extra={"thinking": "on"})
    assert text == '"\u00f6"onNone'
    assert template.variables == {"messages", "thinking", "tools"}


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x.y }}",
        "{{ 1 / 0 }}",
        "{{ 5 | dictsort }}",
        "{{ messages | tojson(indent='x', unknown=1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ dict.update(messages[0], role='x') }}",
    ],
)
def test_what_a_template_must_not_do_is_the_requests_error(source: str) -> None:
    message = dict(USER)
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, TOKENS).render([message])
    assert message == USER


def test_what_it_raises_is_told_and_a_fault_with_its_line() -> None:
    said = ChatTemplate("{{ raise_exception('roles must alternate') }}", TOKENS)
    with pytest.raises(RequestError, match=r"chat template: roles must alternate\. Fix:") as caught:
        said.render([USER])
    assert caught.value.status == 400
    fails = ChatTemplate("one\ntwo {{ messages[0].content + 1 }}", TOKENS)
    with pytest.raises(RequestError, match="chat template: line 2: TypeError: "):
        fails.render([USER])


def test_variables_of_the_request_itself_cannot_be_replaced() -> None:
    template = ChatTemplate("{{ messages | length }}{{ documents }}", TOKENS)
    assert template.render([USER], extra={"documents": ["d"]}) == "1['d']"
    assert template.render([USER]) == "1None"
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.messages"):
        template.render([USER], extra={"messages": []})


def test_broken_templates_are_found_at_start() -> None:
    with pytest.raises(ConfigError, match=r"tool_use\.jinja.* line 1"):
        ChatTemplate("{% if %}", TOKENS, origin="tool_use.jinja")
    with pytest.raises(ConfigError, match="unknown tag 'photograph'"):
        ChatTemplate("{% photograph %}", TOKENS)


def test_the_served_model(model_dir) -> None:
    model = load_served_model(ModelSection(path=str(model_dir)))
    assert model.name == model_dir.name
    assert model.limits.max_model_len == 256
    assert model.limits.eos_token_ids == (model.tokenizer.token_id("<eos>"),)
    short = load_served_model(ModelSection(path=str(model_dir), name="n", max_model_len=64))
    assert (short.name, short.limits.max_model_len) == ("n", 64)
    with pytest.raises(ConfigError, match="max_model_len"):
        load_served_model(ModelSection(path=str(model_dir), max_model_len=1000))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_served_model(ModelSection(path=str(model_dir / "nothing")))
