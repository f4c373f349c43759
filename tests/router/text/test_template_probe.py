"""What a template does with conversations is found out and told; one without an end is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.model import load_served_model
from router.text.template import ChatTemplate
from router.text.template_probe import describe_template
from runtime.config import ModelSection
from runtime.errors import ConfigError
from tests.router.conftest import TEMPLATE, write_model
from tests.router.text.templates import DEEPSEEK_V31, HERMES

TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (TEMPLATE, "reads messages, system messages"),
        (
            HERMES,
            "reads messages, tools, calls, results of calls; writes calls as hermes; "
            "switched by thinking",
        ),
        (
            DEEPSEEK_V31,
            "reads messages, tools, calls, results of calls; writes calls as deepseek-v3.1; "
            "switched by thinking",
        ),
        ("{{ sep_token }}{% for i in range(2) %}{{ documents }}{% endfor %}", "reads documents"),
        ("x", "reads nothing"),
    ],
    ids=("usual", "hermes", "v31", "documents", "nothing"),
)
def test_what_a_template_reads(source: str, told: str) -> None:
    assert describe_template(ChatTemplate(source, TOKENS)) == told


def test_a_template_that_refuses_every_conversation_is_told() -> None:
    template = ChatTemplate("{{ raise_exception('not today') }}", TOKENS)
    assert "refuses a conversation: " in describe_template(template)
    assert "not today" in describe_template(template)


def test_a_template_without_an_end_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.text.template_environment.MAX_SECONDS", 0.05)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    write_model(tmp_path, template=loop)
    with pytest.raises(
        ConfigError, match=r"tokenizer_config\.json.*one message cannot be"
    ) as caught:
        load_served_model(ModelSection(path=str(tmp_path)))
    assert "more than 0.05 s of CPU time" in caught.value.problem
    write_model(tmp_path, template="{{ raise_exception('two messages, please') }}")
    assert load_served_model(ModelSection(path=str(tmp_path))).chat_template is not None
