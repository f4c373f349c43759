"""A checkpoint's templates and special tokens are found wherever they stand, and ranked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.text.checkpoint_files import special_tokens
from router.text.template import checkpoint_templates
from router.text.template_files import overruled_templates, template_sources
from runtime.errors import ConfigError

SETTINGS, PROCESSOR = "tokenizer_config.json", "chat_template.json"
NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {}),
        ({SETTINGS: {"chat_template": None}}, {}),
        ({SETTINGS: {"chat_template": "S"}}, {"default": "S"}),
        ({SETTINGS: {"chat_template": NAMED}}, {"default": "D", "tool_use": "T"}),
        ({SETTINGS: {"chat_template": {"rag": "R"}}}, {"rag": "R"}),
        ({PROCESSOR: {"chat_template": "P"}}, {"default": "P"}),
        (
            {SETTINGS: {"chat_template": NAMED}, PROCESSOR: {"chat_template": "P"}},
            {"default": "P", "tool_use": "T"},
        ),
        ({SETTINGS: {"chat_template": NAMED}, "chat_template.jinja": "F"}, {"default": "F"}),
        (
            {
                SETTINGS: {"chat_template": "S"},
                "chat_template.jinja": "F",
                "additional_chat_templates/tool_use.jinja": "A",
                "additional_chat_templates/rag.jinja": "R",
            },
            {"default": "F", "tool_use": "A", "rag": "R"},
        ),
        (
            {SETTINGS: {"chat_template": NAMED}, "additional_chat_templates/tool_use.jinja": "A"},
            {"default": "D", "tool_use": "A"},
        ),
    ],
    ids=str,
)
def test_where_templates_are_found(
    tmp_path: Path, files: dict[str, Any], expected: dict[str, str]
) -> None:
    write(tmp_path, files)
    found = template_sources(tmp_path)
    assert {name: source.text for name, source in found.items()} == expected
    for source in found.values():
        assert (tmp_path / source.origin).is_file()
    rendered = {name: t.render([{}]) for name, t in checkpoint_templates(tmp_path).items()}
    assert rendered == expected
    assert set(checkpoint_templates(tmp_path, "rag")) == expected.keys() & {"rag"}


def test_what_does_not_count_is_told(tmp_path: Path) -> None:
    write(tmp_path, {SETTINGS: {"chat_template": NAMED}})
    assert not list(overruled_templates(tmp_path))
    write(tmp_path, {"chat_template.jinja": "D\n"})
    (told,) = overruled_templates(tmp_path)
    assert "'tool_use' of tokenizer_config.json" in told
    write(tmp_path, {"chat_template.jinja": "F"})
    first, _ = overruled_templates(tmp_path)
    assert first == (
        "the template 'default' of tokenizer_config.json differs from chat_template.jinja, "
        "which counts"
    )


@pytest.mark.parametrize(
    "value", [1, [1], [{"name": "x"}], [{"name": ["x"], "template": "t"}], {"a": 1}], ids=str
)
def test_what_is_no_template_is_refused_with_its_file(tmp_path: Path, value: object) -> None:
    write(tmp_path, {SETTINGS: {"chat_template": value}})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json.*chat_template"):
        template_sources(tmp_path)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read"):
        template_sources(tmp_path)


def test_special_tokens_stand_in_two_files(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "bos_token": None,
        "eos_token": {"content": "<e>", "__type": "AddedToken"},
        "add_bos_token": True,
        "image_token": "<i>",
    }
    write(tmp_path, {SETTINGS: settings})
    assert special_tokens(tmp_path) == {"eos_token": "<e>", "image_token": "<i>"}
    write(tmp_path, {"special_tokens_map.json": {"bos_token": "<b>", "eos_token": "<f>"}})
    old = {"bos_token": "<b>", "eos_token": "<f>", "image_token": "<i>"}
    assert special_tokens(tmp_path) == old
    settings["added_tokens_decoder"] = {"1": {"content": "<e>"}}
    write(tmp_path, {SETTINGS: settings})
    assert special_tokens(tmp_path) == {"eos_token": "<e>", "image_token": "<i>"}
