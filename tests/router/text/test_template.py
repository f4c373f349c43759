"""Templates render as the checkpoint means them and can do nothing else."""

from __future__ import annotations

import json

import pytest

from router.errors import RequestError
from router.model import load_served_model
from router.text.template import ChatTemplate, load_chat_template
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
    ],
)
def test_what_a_template_must_not_do_is_the_requests_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, TOKENS).render([USER])


def test_broken_templates_are_found_at_start() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate("{% if %}", TOKENS)


def test_where_templates_are_found(tmp_path) -> None:
    assert load_chat_template(tmp_path) is None
    settings = {"chat_template": [{"name": "default", "template": "D"}], "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render([USER]) == "D"
    assert load_chat_template(tmp_path, "tool_use") is None
    settings["chat_template"].append({"name": "tool_use", "template": "T"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tool_use = load_chat_template(tmp_path, "tool_use")
    assert tool_use is not None
    assert tool_use.render([USER]) == "T"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_chat_template(tmp_path, "tool_use") is None
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    tool_use = load_chat_template(tmp_path, "tool_use")
    assert tool_use is not None
    assert tool_use.render([USER]) == "A"
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render([USER]) == "F"


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
