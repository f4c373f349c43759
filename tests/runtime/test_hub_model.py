"""Which words are names of models on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.hub_model import HubModel


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3", "main"),
        ("a/b.c_d-1@refs/pr/7", "a/b.c_d-1", "refs/pr/7"),
        ("a/b@v1.0", "a/b", "v1.0"),
    ],
)
def test_names(text: str, repo: str, revision: str) -> None:
    model = HubModel.parse(text)
    assert model == HubModel(repo=repo, revision=revision)
    assert str(model) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "/a/b",
        "./a/b",
        "~/a",
        "a/b/c",
        "a/b@",
        "a/b@x@y",
        "../a",
        "a/../b",
        "configs/x.toml",
        "a/b c",
        "a/-b",
        "a/b@--x",
        "a//b",
        "a/b/",
    ],
)
def test_no_names(text: str) -> None:
    assert HubModel.parse(text) is None


def test_a_path_that_is_there_is_meant(tmp_path: Path) -> None:
    assert HubModel.meant_by("a/b", tmp_path) == HubModel(repo="a/b")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert HubModel.meant_by("a/b", tmp_path) is None
