"""How a template takes earlier calls is found out by rendering, and with it the model's own way."""

from __future__ import annotations

import pytest

from router.text.call_history import call_history
from router.text.calls.formats import CALL_FORMATS
from router.text.reasoning import REASONING_FORMATS
from router.text.template import ChatTemplate
from runtime.config.router import REASONING_PARSERS, TOOL_PARSERS
from tests.router.conftest import TEMPLATE
from tests.router.text import templates


@pytest.mark.parametrize(
    ("source", "name", "wants_objects", "no_content"),
    [
        (templates.HERMES, "hermes", False, None),
        (templates.LLAMA, "llama3-json", True, None),
        (templates.GLM, "glm-4.5", True, ""),
        (templates.DEEPSEEK_V3, "deepseek-v3", False, None),
        (templates.DEEPSEEK_V31, "deepseek-v3.1", False, None),
        (templates.STRANGE, None, True, None),
    ],
)
def test_a_templates_way_with_calls(
    source: str, name: str | None, wants_objects: bool, no_content: str | None
) -> None:
    history = call_history(ChatTemplate(source, {"bos_token": "", "eos_token": ""}))
    assert history is not None
    assert history.call_format is (None if name is None else CALL_FORMATS[name])
    assert (history.wants_objects, history.no_content) == (wants_objects, no_content)
    assert history.reads_results


def test_templates_that_know_no_calls() -> None:
    for source in (TEMPLATE, templates.FORGETFUL, "{{ raise_exception('never') }}"):
        assert call_history(ChatTemplate(source, {})) is None


def test_some_templates_write_calls_only_where_tools_are_offered() -> None:
    source = templates.HERMES.replace("tools or []", "tools")
    history = call_history(ChatTemplate(source, {"bos_token": "", "eos_token": ""}))
    assert history is not None
    assert history.call_format is CALL_FORMATS["hermes"]
    assert history.reads_results


def test_what_takes_results_as_well_is_preferred() -> None:
    """An answer of calls alone that is not the last may be read as text."""
    source = templates.HERMES.replace(
        "m.content or ''", "(m.content or '') if loop.last else m.content.strip()"
    )
    history = call_history(ChatTemplate(source, {"bos_token": "", "eos_token": ""}))
    assert history is not None
    assert (history.no_content, history.reads_results) == ("", True)


def test_some_templates_write_either_content_or_calls() -> None:
    source = templates.DEEPSEEK_V3.replace(
        "m.tool_calls or []", "(m.tool_calls if m.content is none else []) or []"
    )
    for text, takes_both in ((source, False), (templates.DEEPSEEK_V3, True)):
        history = call_history(ChatTemplate(text, {"bos_token": "", "eos_token": ""}))
        assert history is not None
        assert (history.takes_both, history.no_content) == (takes_both, None)


def test_a_template_may_know_calls_and_no_results() -> None:
    source = templates.HERMES.replace("m.role == 'tool'", "m.role == 'nobody'")
    history = call_history(ChatTemplate(source, {"bos_token": "", "eos_token": ""}))
    assert history is not None
    assert not history.reads_results


def test_the_configuration_knows_every_parser() -> None:
    assert set(TOOL_PARSERS) == {"auto", "none", *CALL_FORMATS}
    assert set(REASONING_PARSERS) == {"auto", "none", *REASONING_FORMATS}
