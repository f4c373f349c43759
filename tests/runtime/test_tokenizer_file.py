"""A tokenizer.json is made of a tiktoken.model once, whole, and where it can be kept."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from runtime import tokenizer_file as module
from runtime.errors import ConfigError
from runtime.tiktoken_rules import NUM_SPECIAL, byte_letters, read_ranks, special_names
from runtime.tokenizer_file import has_tokenizer, is_made_of_ranks, tokenizer_file

TOKENS = [*(bytes([byte]) for byte in range(256)), b"ab", b"aba", b"aa", b"aaa"]
SETTINGS: dict[str, Any] = {
    "tokenizer_class": "TikTokenTokenizer",
    "added_tokens_decoder": {
        "260": {"content": "[BOS]", "special": True},
        "262": {"content": "<|call|>", "special": False},
    },
}


def write_ranks(folder: Path, tokens: list[bytes] = TOKENS, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tandem" / "tokenizers"


def test_it_stands_beside_the_checkpoint_and_is_made_once(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "model")
    path = tokenizer_file(folder)
    assert path.parent == folder
    assert path.stat().st_mode & 0o777 == 0o644
    content = json.loads(path.read_text(encoding="utf-8"))
    assert len(content["model"]["vocab"]) == len(TOKENS)
    assert content["model"]["merges"] == [
        ["a", "b"],
        ["ab", "a"],
        ["a", "a"],
        ["aa", "a"],
        ["a", "aa"],
    ]
    added = {token["id"]: (token["content"], token["special"]) for token in content["added_tokens"]}
    assert len(added) == NUM_SPECIAL
    assert added[260] == ("[BOS]", True)
    assert added[261] == ("<|reserved_token_261|>", True)
    assert added[262] == ("<|call|>", False)
    written = path.stat().st_mtime_ns
    assert tokenizer_file(folder) == path
    assert path.stat().st_mtime_ns == written
    assert {file.name for file in folder.iterdir()} == {
        "tiktoken.model",
        "tokenizer_config.json",
        path.name,
    }


def test_it_is_made_anew_where_what_it_is_made_of_changes(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "model")
    first = tokenizer_file(folder)
    write_ranks(folder, added_tokens_decoder={"261": {"content": "<|im_end|>"}})
    second = tokenizer_file(folder)
    assert second != first
    assert "<|im_end|>" in second.read_text()


def test_a_checkpoint_with_a_file_of_its_own_keeps_it(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json, and no tiktoken\.model"):
        tokenizer_file(tmp_path)
    folder = write_ranks(tmp_path / "model")
    assert has_tokenizer(folder)
    assert is_made_of_ranks(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_file(folder) == folder / "tokenizer.json"
    assert not is_made_of_ranks(folder)


def _refuse_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the refusal of a read-only volume is played."""
    make = module.tempfile.mkstemp

    def refused(*, dir: Path, prefix: str) -> tuple[int, str]:
        if folder == dir or folder in dir.parents:
            raise OSError(30, os.strerror(30))
        return make(dir=dir, prefix=prefix)

    monkeypatch.setattr(module.tempfile, "mkstemp", refused)


def test_beside_a_read_only_checkpoint_it_is_kept_in_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_ranks(tmp_path / "model")
    _refuse_below(folder, monkeypatch)
    path = tokenizer_file(folder)
    assert path.parent == cache
    assert tokenizer_file(folder) == path
    path.unlink()
    _refuse_below(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"model \(Read-only file system\).*XDG_CACHE_HOME"):
        tokenizer_file(folder)


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_ranks(tmp_path / "model")

    def full(handle: int) -> None:
        raise OSError(28, os.strerror(28))

    before = set(folder.iterdir())
    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        tokenizer_file(folder)
    assert set(folder.iterdir()) == before
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the byte 0x00 has no rank"),
        (b"YQ== x", "line 1 is no token"),
        (b"Y 0", "line 1 is no token"),
        (b"YQ== 0 1", "line 1 is no token"),
        (b"YQ== 7", "lines are missing"),
        (b"YQ== 0\nYQ== 1", "lines are missing"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    folder = write_ranks(tmp_path / "model")
    (folder / "tiktoken.model").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"tiktoken\.model: .*{problem}"):
        tokenizer_file(folder)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class = 'QWenTokenizer'"),
        ({"added_tokens_decoder": {"260": {"content": "ab"}}}, "'ab' is a common token, too"),
        (
            {"added_tokens_decoder": {"260": {"content": "x"}, "261": {"content": "x"}}},
            "260 and 261 are both 'x'",
        ),
        ({"added_tokens_decoder": [1]}, "tiktoken"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    folder = write_ranks(tmp_path / "model", **settings)
    with pytest.raises(ConfigError, match=problem):
        tokenizer_file(folder)


def test_settings_are_needed(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"needs tokenizer_config\.json"):
        tokenizer_file(folder)


def test_letters_of_bytes_are_one_each() -> None:
    letters = byte_letters()
    assert sorted(letters) == list(range(256))
    assert len(set(letters.values())) == 256
    assert letters[ord("a")] == "a"
    assert letters[ord(" ")] == "\u0120"


def test_ranks_are_read_back() -> None:
    content = b"\n".join(b"%s %d" % (base64.b64encode(t), r) for r, t in enumerate(TOKENS))
    assert read_ranks(content) == {token: rank for rank, token in enumerate(TOKENS)}
    assert special_names(5, {})["<|reserved_token_5|>"] == (5, True)


def test_grammars_read_what_was_made(tmp_path: Path) -> None:
    from grammar.vocabulary import PieceEncoding, read_vocabulary

    vocabulary = read_vocabulary(write_ranks(tmp_path / "model"), len(TOKENS) + NUM_SPECIAL)
    assert vocabulary.encoding is PieceEncoding.BYTE_LEVEL
    assert vocabulary.pieces[256:260] == ["ab", "aba", "aa", "aaa"]
    assert vocabulary.special[260] == "[BOS]"
    assert vocabulary.special[262] == "<|call|>"
