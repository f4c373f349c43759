"""What several files of a checkpoint say is joined or ranked, and what does not count is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.model import ServedModel, load_served_model
from runtime.config import ModelSection
from runtime.errors import ConfigError
from tests.router.conftest import SPECIAL, write_model

BOS, EOS, USER, ASSISTANT = range(len(SPECIAL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path)
    return tmp_path


def change(folder: Path, name: str, **fields: Any) -> None:
    """Write fields into a JSON file; None takes one out."""
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= fields
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept))


def load(folder: Path) -> ServedModel:
    return load_served_model(ModelSection(path=str(folder)))


@pytest.mark.parametrize(
    ("config", "generation", "settings", "expected"),
    [
        (EOS, None, "<eos>", (EOS,)),
        (EOS, USER, "<eos>", (EOS, USER)),
        (EOS, [USER, ASSISTANT], "<eos>", (EOS, USER, ASSISTANT)),
        (None, None, "<eos>", (EOS,)),
        (None, None, {"content": "<user>"}, (USER,)),
        ([EOS], None, None, (EOS,)),
        (None, ASSISTANT, None, (ASSISTANT,)),
        (None, None, "<nobody>", ()),
        (-1, 10**6, "<eos>", (EOS,)),
        (None, None, None, ()),
    ],
    ids=str,
)
def test_any_end_that_a_file_names_ends_an_answer(
    folder: Path, config: Any, generation: Any, settings: Any, expected: tuple[int, ...]
) -> None:
    change(folder, "config.json", eos_token_id=config)
    change(folder, "generation_config.json", eos_token_id=generation)
    change(folder, "tokenizer_config.json", eos_token=settings)
    model = load(folder)
    assert model.limits.eos_token_ids == expected
    told = " ".join(model.remarks)
    assert ("different ends of an answer" in told) == (len(expected) > 1)
    assert ("goes on to its limit" in told) == (not expected)
    assert ("-1 of config.json is no token" in told) == (config == -1)


def test_files_that_agree_say_nothing(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=EOS, bos_token_id=BOS)
    assert load(folder).remarks == ()


def test_an_end_of_older_files_and_one_that_is_a_common_token(folder: Path) -> None:
    change(folder, "config.json", eos_token_id=9)
    change(folder, "special_tokens_map.json", eos_token="<user>")
    model = load(folder)
    assert model.limits.eos_token_ids == (USER, 9)
    assert f"{USER} '<user>' (special_tokens_map.json)" in " ".join(model.remarks)
    text = model.tokenizer.vocabulary.token_text(9)
    assert f"an answer ends with 9 {text!r}, which is no special token" in model.remarks


def test_other_facts_that_differ_are_told(folder: Path) -> None:
    change(folder, "config.json", bos_token_id=USER, pad_token_id=3)
    change(folder, "generation_config.json", pad_token_id=2)
    change(folder, "tokenizer_config.json", model_max_length=128)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    told = load(folder).remarks
    assert told == (
        "the files name different bos_token_ids: 2 (config.json), 0 (tokenizer_config.json); "
        "what the tokenizer and the chat template write counts",
        "the files name different pad_token_ids: 3 (config.json), 2 (generation_config.json); "
        "sequences are not padded here",
        "tokenizer_config.json says model_max_length = 128; "
        "max_position_embeddings = 256 of config.json counts",
        "the template 'default' of tokenizer_config.json differs from chat_template.jinja, "
        "which counts",
    )
    assert load(folder).limits.max_model_len == 256


def test_a_bos_that_is_asked_for_and_absent_is_told(folder: Path) -> None:
    change(folder, "tokenizer_config.json", bos_token=None)
    model = load(folder)
    assert any("asks for a bos_token" in remark for remark in model.remarks)
    change(folder, "special_tokens_map.json", bos_token="<bos>")
    model = load(folder)
    assert model.remarks == ()
    assert model.tokenizer.encode("x", add_special_tokens=True)[0] == BOS


def test_a_bos_that_the_tokenizer_itself_adds_counts(folder: Path) -> None:
    processor = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
    }
    change(folder, "tokenizer.json", post_processor=processor)
    change(folder, "tokenizer_config.json", add_bos_token=True)
    model = load(folder)
    assert model.remarks == ()
    assert model.tokenizer.encode("x", add_special_tokens=True).count(BOS) == 1
    change(folder, "tokenizer_config.json", add_bos_token=False)
    model = load(folder)
    assert any("add_bos_token = false" in remark for remark in model.remarks)
    assert model.tokenizer.encode("x", add_special_tokens=True)[0] == BOS


@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_that_other_files_add_are_tokens(folder: Path, file: str) -> None:
    size = len(load(folder).tokenizer.vocabulary.pieces)
    if file == "added_tokens.json":
        change(folder, file, **{"<|end|>": size, "<|call|>": size + 1})
    else:
        added = {
            str(size): {"content": "<|end|>", "special": True},
            str(size + 1): {"content": "<|call|>", "special": False},
        }
        change(folder, file, added_tokens_decoder=added)
    change(folder, "tokenizer_config.json", eos_token="<|end|>")
    change(folder, "config.json", vocab_size=size + 2)
    model = load(folder)
    assert model.limits.eos_token_ids == (EOS, size)
    encoded = model.tokenizer.encode("a<|call|>", add_special_tokens=False)
    assert encoded[-1] == size + 1
    vocabulary = model.tokenizer.vocabulary
    assert vocabulary.special_ids >= {size}
    assert size + 1 not in vocabulary.special_ids
    change(folder, "config.json", vocab_size=size)
    with pytest.raises(ConfigError, match=r"below vocab_size = \d+ .*'<\|end\|>', '<\|call\|>'"):
        load(folder)


def test_an_id_that_two_files_tell_differently_is_told(folder: Path) -> None:
    change(folder, "tokenizer_config.json", added_tokens_decoder={"7": {"content": "<user>"}})
    assert "'<user>' is the added token 7 by its own file, and 2 here" in load(folder).remarks


@pytest.mark.parametrize("value", [[1], {"x": {"content": "a"}}, {"7": 5}], ids=str)
def test_added_tokens_that_are_none_are_refused(folder: Path, value: Any) -> None:
    change(folder, "tokenizer_config.json", added_tokens_decoder=value)
    with pytest.raises(ConfigError, match="added tokens"):
        load(folder)


@pytest.mark.parametrize("token_id", [[1], {}, "9" * 5000, -1, 1.5, None], ids=str)
def test_older_added_tokens_that_are_none_are_refused(folder: Path, token_id: Any) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": token_id}))
    with pytest.raises(ConfigError, match="added tokens"):
        load(folder)


def test_an_end_that_is_no_id_is_refused(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id="two")
    with pytest.raises(ConfigError, match=r"generation_config\.json.*'two'"):
        load(folder)
