"""Which templates a model is served with: its own, one that ships for its family, or a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.model import ServedModel, load_served_model
from router.text.calls.deepseek import DEEPSEEK_MARKS
from router.text.calls.dsml import DSML
from router.text.calls.formats import CALL_FORMATS
from router.text.calls.kimi import KIMI_MARKS
from router.text.template_choice import shipped_template
from runtime.config import ModelSection
from runtime.config.file import dump_config, load_config, parse_config, with_settings
from runtime.errors import ConfigError
from tests.router.conftest import SPECIAL, TEMPLATE, write_model
from tests.router.text import templates

V3 = "{% for m in messages %}<\uff5cUser\uff5c>{{ m.content }}{% endfor %}"
R1 = V3 + "{{ messages[0].content.split('</think>')[-1] }}"
V31 = R1 + "{{ '<think>' if thinking else '</think>' }}"
KIMI = "{% for m in messages %}<|im_user|>user<|im_middle|>{{ m.content }}{% endfor %}"
MINE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def served(
    folder: Path,
    template: str | None,
    special: tuple[str, ...] = (),
    *,
    model_type: str = "deepseek_v3",
    choice: str = "auto",
) -> ServedModel:
    write_model(folder, template=template or "", special=[*SPECIAL, *special])
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))
    if template is None:
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        del settings["chat_template"]
        path.write_text(json.dumps(settings))
    return load_served_model(ModelSection(path=str(folder), chat_template=choice))


@pytest.mark.parametrize(
    ("template", "special", "name", "parser"),
    [
        (V3, DEEPSEEK_MARKS, "deepseek-v3", "deepseek-v3"),
        (R1, DEEPSEEK_MARKS, "deepseek-r1", "deepseek-v3"),
        (V31, DEEPSEEK_MARKS, "deepseek-v3.1", "deepseek-v3.1"),
        (V31, (*DEEPSEEK_MARKS, DSML), "deepseek-v3.2", "deepseek-v3.2"),
        (V3 + f"{{% if tool_calls %}}{DEEPSEEK_MARKS.call_begin}{{% endif %}}", (), "deepseek-v3",
         "deepseek-v3"),  # whose marks are no tokens
        (KIMI, KIMI_MARKS, "kimi-k2", "kimi-k2"),
    ],
)  # fmt: skip
def test_one_that_ships_stands_in_where_tools_come(
    tmp_path: Path, template: str, special: tuple[str, ...], name: str, parser: str
) -> None:
    model = served(tmp_path, template, tuple(special))
    assert model.chat_template is not None
    assert model.tool_template is not None
    assert model.chat_template.source == template
    assert model.tool_template.source == shipped_template(name).source
    assert model.formats.calls is CALL_FORMATS[parser]
    assert f'model.chat_template = "{name}"' in model.template_remark


@pytest.mark.parametrize(
    ("special", "model_type", "name"),
    [
        ((DSML,), "deepseek_v3", "deepseek-v3.2"),
        (DEEPSEEK_MARKS, "deepseek_v32", "deepseek-v3.2"),
        (KIMI_MARKS, "kimi_k2", "kimi-k2"),
        (DEEPSEEK_MARKS, "deepseek_v3", None),  # of which there are several
        ((), "llama", None),
    ],
)
def test_without_a_template_only_what_is_certain_stands_in(
    tmp_path: Path, special: tuple[str, ...], model_type: str, name: str | None
) -> None:
    model = served(tmp_path, None, tuple(special), model_type=model_type)
    if name is None:
        assert model.chat_template is model.tool_template is None
        assert "none that ships is known to fit" in model.template_remark
        return
    assert model.chat_template is model.tool_template
    assert model.tool_template is not None
    assert model.tool_template.source == shipped_template(name).source
    assert "has no chat template" in model.template_remark


def test_a_template_that_reads_tools_is_left_alone(tmp_path: Path) -> None:
    model = served(tmp_path, templates.DEEPSEEK_V31, tuple(DEEPSEEK_MARKS))
    assert model.chat_template is model.tool_template
    assert model.template_remark == ""


def test_where_none_fits_the_field_is_named(tmp_path: Path) -> None:
    model = served(tmp_path, TEMPLATE, tuple(DEEPSEEK_MARKS))  # not turns of DeepSeek's
    assert model.chat_template is model.tool_template
    assert 'model.chat_template = "NAME" takes one of deepseek-v3, ' in model.template_remark


def test_a_name_or_a_file_holds_for_all(tmp_path: Path) -> None:
    model = served(tmp_path, TEMPLATE, choice="deepseek-v3.1")
    assert model.chat_template is model.tool_template
    assert model.tool_template is not None
    assert model.tool_template.source == shipped_template("deepseek-v3.1").source
    assert model.template_remark == ""
    path = tmp_path / "mine.jinja"
    path.write_text(MINE)
    model = served(tmp_path, TEMPLATE, choice=str(path))
    assert model.chat_template is model.tool_template
    assert model.chat_template is not None
    assert model.chat_template.render([{"content": "hi"}]) == "<bos>hi"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"{% if %}", "line 1"),
        (b"\xff\xfe", "no text in UTF-8"),
    ],
)
def test_a_file_that_is_no_template_is_named(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        served(tmp_path, TEMPLATE, choice=str(path))
    assert caught.value.path == "model.chat_template"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("deepseek-v33", "did you mean deepseek-v3"),
        ("Kimi-K2", r"did you mean kimi-k2"),
        ("chatml", "one of auto, deepseek-v3, deepseek-r1, deepseek-v3.1, deepseek-v3.2, kimi-k2"),
        ("", "path of a file"),
    ],
)
def test_a_wrong_name_is_told_the_right_ones(value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        with_settings(load_config(None), [f"model.chat_template={value}"], base=Path("/"))
    assert caught.value.path == "model.chat_template"


def test_files_are_relative_to_the_configuration(tmp_path: Path) -> None:
    for value, expected in (
        ("mine.jinja", str(tmp_path / "mine.jinja")),
        ("../mine", str(tmp_path / "../mine")),
        ("/t/mine", "/t/mine"),
        ("kimi-k2", "kimi-k2"),
        ("auto", "auto"),
    ):
        config = parse_config({"model": {"chat_template": value}}, base=tmp_path)
        assert config.model.chat_template == expected
        copy = tmp_path / "copy.toml"
        copy.write_text(dump_config(config))
        assert load_config(copy) == config
