"""The configuration files that ship: valid, complete, commented, and equal to the defaults."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from pathlib import Path

import pytest

import deploy
from deploy.checks.cluster import check_config, resolve_config
from runtime.config import ClusterConfig
from runtime.config.file import load_config

CONFIGS = Path(deploy.__file__).parent / "configs"
DEFAULT = CONFIGS / "default.toml"


def test_the_built_in_file_is_the_defaults() -> None:
    assert load_config(DEFAULT) == ClusterConfig()


def test_the_built_in_file_names_every_field_in_order() -> None:
    table = tomllib.loads(DEFAULT.read_text(encoding="utf-8"))
    fields = {
        section.name: [field.name for field in dataclasses.fields(section.default_factory())]
        for section in dataclasses.fields(ClusterConfig)
        if callable(section.default_factory)
    }
    for name, keys in fields.items():
        assert sorted(table[name]) == sorted(keys), name
    assert list(table) == list(fields)


def test_the_built_in_file_explains_every_field() -> None:
    lines = DEFAULT.read_text(encoding="utf-8").splitlines()
    bare = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r"\w+ = ", line) and not before.startswith("# ")
    ]
    assert not bare


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_is_valid_with_the_bundled_model(path: Path) -> None:
    check_config(resolve_config(load_config(path)), num_devices=0)
