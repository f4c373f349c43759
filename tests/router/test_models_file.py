"""The file of further models: what it may say, and names that would be of two."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.model import load_served_models
from router.models_file import ModelEntry, read_models
from runtime.config import ClusterConfig, ModelSection, RouterSection
from runtime.config.file import dump_config, load_config, parse_config
from runtime.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text)
    return path


def test_a_table_is_a_model(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[models."org/one"]\npath = "one"\naliases = ["small", "fast"]\nmax_model_len = 128\n'
        'tool_parser = "hermes"\nchat_template = "one.jinja"\n'
        '[models.two]\npath = "/two"\nchat_template = "kimi-k2"\n',
    )
    assert read_models(path) == (
        ModelEntry(
            name="org/one",
            path=str(tmp_path / "one"),
            aliases=("small", "fast"),
            max_model_len=128,
            tool_parser="hermes",
            chat_template=str(tmp_path / "one.jinja"),
        ),
        ModelEntry(name="two", path="/two", chat_template="kimi-k2"),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models", "no valid TOML"),
        (f"[models]\na = {'[' * 100_000}", "no valid TOML: nested too deep"),
        (f"[models]\na = {'1' * 5000}", "no valid TOML"),
        ("", r"a table \[models.NAME\]"),
        ("[model.x]\npath='x'", r"a table \[models.NAME\]"),
        ("models = 3", r"a table \[models.NAME\]"),
        ("[models]\nx = 3", "models.x"),
        ("[models.x]", "models.x.path"),
        ("[models.x]\npath='x'\nalias=['y']", "models.x.alias = .*unknown key.*aliases"),
        ("[models.x]\npath=3", "models.x.path = 3: is a int"),
        ("[models.x]\npath='x'\naliases=[3]", "models.x.aliases = 3"),
        ("[models.x]\npath='x'\nmax_model_len=-1", "models.x.max_model_len"),
        ("[models.x]\npath='x'\ntool_parser='mine'", "models.x.tool_parser = 'mine'"),
        (
            "[models.x]\npath='x'\nchat_template='kimi'",
            "models.x.chat_template = 'kimi': .*did you mean kimi-k2",
        ),
    ],
)
def test_invalid_values_name_the_field(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_models(write(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.models_file = .*none\.toml"):
        read_models(tmp_path / "none.toml")


def test_its_place_is_beside_the_configuration(tmp_path: Path) -> None:
    config = parse_config({"router": {"models_file": "models.toml"}}, base=tmp_path)
    assert config.router.models_file == str(tmp_path / "models.toml")
    copy = tmp_path / "copy.toml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


@pytest.mark.parametrize(
    ("table", "aliases", "words"),
    [
        ("[models.first]\npath='{}'", "", "'first'"),
        ("[models.other]\npath='{}'\naliases=['first']", "", "is a name of 'first', too"),
        ("[models.small]\npath='{}'", "small", "is a name of 'first', too"),
        ("[models.o]\npath='{0}'\naliases=['x']\n[models.p]\npath='{0}'\naliases=['x']", "", "'o'"),
        ("[models.o]\npath='{}'\naliases=['o']", "", "is a name of 'o', too"),
    ],
)
def test_a_name_is_of_one_model(
    model_dir: Path, tmp_path: Path, table: str, aliases: str, words: str
) -> None:
    path = write(tmp_path, table.format(model_dir))
    config = ClusterConfig(
        model=ModelSection(path=str(model_dir), name="first", aliases=aliases),
        router=RouterSection(models_file=str(path)),
    )
    with pytest.raises(ConfigError, match=words):
        load_served_models(config)


def test_aliases_of_the_first_model_stand_in_its_section(model_dir: Path) -> None:
    section = ModelSection(path=str(model_dir), name="first", aliases=" gpt-4o, chat ,")
    (model,) = load_served_models(ClusterConfig(model=section))
    assert model.names == ("first", "gpt-4o", "chat")
