"""Kimi's tokenizer: the ids of `tiktoken`, by its rules, for ten thousand texts of every kind."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from router.model import load_served_model
from router.text.tokenizer import LONG_RUN, LONG_TEXT, Tokenizer, cut_text
from runtime.config import ModelSection
from runtime.tiktoken_rules import NUM_SPECIAL, SPLIT, byte_letters

NUM_TEXTS = 10_000
VOCABULARY = 4000
SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>")
TEMPLATE = (
    "{% for m in messages %}<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
WORDS = (
    *("the", "The", "THE", "don't", "DON'T", "we'll", "I've", "it'S", "caf\u00e9", "na\u00efve"),
    *("HTTPServer", "camelCase", "snake_case", "x1", "3.14", "1234567", "0xFF", "2026-11-28"),
    *("def f(x):", "return x", "    ", "\t", "\n", "\n\n", "\r\n", " \n ", "//", "/* */", "!=="),
    *("\u4f60\u597d", "\u4e16\u754c", "\u4e2d\u6587ABC", "\u7b2c3\u7ae0", "\u3002", "\uff0c"),
    *("\u65e5\u672c\u8a9e\u306e", "\u30c6\u30b9\u30c8", "\ud55c\uad6d\uc5b4", "\u0939\u093f"),
    *("\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea"),
    *("\u2163", "\u00b2", "\u0663", "\u01c5", "\u02b0", "\u017fK's", "e\u0301", "\u00a0", "\u3000"),
)


def texts_of(rng: random.Random, number: int) -> list[str]:
    """Words side by side, runs of one letter, and any characters at all."""

    def words() -> str:
        return rng.choice(("", " ")).join(rng.choices(WORDS, k=rng.randrange(1, 20)))

    def runs() -> str:
        letters = rng.choices(" \n\t-=aA1_'s\u4e00", k=5)
        return "".join(letter * rng.randrange(1, 30) for letter in letters)

    def anything() -> str:
        borders = ((0, 0x80), (0x80, 0x3000), (0x3400, 0xD800), (0xE000, 0x110000))
        return "".join(chr(rng.randrange(*rng.choice(borders))) for _ in range(12))

    kinds: tuple[Callable[[], str], ...] = (words, words, runs, anything)
    texts = [rng.choice(kinds)() for _ in range(number)]
    return [
        f"{text}{rng.choice(SPECIAL)}{text}" if not n % 20 else text for n, text in enumerate(texts)
    ]


def trained_ranks(texts: list[str]) -> dict[bytes, int]:
    letters = byte_letters()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=list(letters.values()), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    byte_of = {letter: byte for byte, letter in letters.items()}
    entries = backend.get_vocab().items()
    return {bytes(byte_of[letter] for letter in entry): rank for entry, rank in entries}


def write_kimi(folder: Path, ranks: dict[bytes, int]) -> None:
    """What a checkpoint of Kimi's has beside its weights."""
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    first = len(ranks)
    added = {first + n: {"content": text, "special": True} for n, text in enumerate(SPECIAL)}
    files: dict[str, Any] = {
        "config.json": {
            "vocab_size": first + NUM_SPECIAL,
            "max_position_embeddings": 4096,
            "eos_token_id": first + 1,
        },
        "generation_config.json": {"eos_token_id": first + 2},
        "tokenizer_config.json": {
            "tokenizer_class": "TikTokenTokenizer",
            "added_tokens_decoder": added,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "chat_template": TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return trained_ranks(texts_of(random.Random(1), 3000))


@pytest.fixture(scope="module")
def folder(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    write_kimi(folder, ranks)
    return folder


@pytest.fixture(scope="module")
def theirs(ranks: dict[bytes, int], folder: Path) -> Callable[[str], list[int]]:
    import tiktoken

    ours = Tokenizer.from_dir(folder)
    names = {ours.vocabulary.token_text(n): n for n in range(len(ranks), len(ranks) + NUM_SPECIAL)}
    encoding = tiktoken.Encoding("kimi", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=names)
    return lambda text: list(encoding.encode(text, allowed_special="all"))


def test_ten_thousand_texts_have_the_ids_of_tiktoken(
    folder: Path, theirs: Callable[[str], list[int]]
) -> None:
    tokenizer = Tokenizer.from_dir(folder)
    texts = texts_of(random.Random(2), NUM_TEXTS)
    ours = tokenizer.encode_all(texts, add_special_tokens=False)
    for text, ids in zip(texts, ours, strict=True):
        assert ids == theirs(text), text
        pieces = (tokenizer.vocabulary.token_bytes(token_id) for token_id in ids)
        assert b"".join(pieces).decode() == text


def test_long_runs_are_cut_where_kimi_cuts_them(
    folder: Path, theirs: Callable[[str], list[int]]
) -> None:
    tokenizer = Tokenizer.from_dir(folder)
    for text in ("ab" * LONG_RUN + " a", " " * (LONG_RUN + 3) + "a", "the " * (LONG_TEXT // 3)):
        expected = [token_id for piece in cut_text(text) for token_id in theirs(piece)]
        assert tokenizer.encode_all([text, "a"], add_special_tokens=False) == [
            expected,
            theirs("a"),
        ]


def test_where_long_runs_are_cut() -> None:
    word = "a" * LONG_RUN
    assert cut_text("a b") == ["a b"]
    assert cut_text(word) == [word]
    assert cut_text(f"a {word}bc d") == [f"a {word}", "bc d"]
    assert cut_text(word + word + "b") == [word, word, "b"]
    lines = "x\n" * LONG_TEXT
    assert cut_text(lines) == [lines[:LONG_TEXT], lines[LONG_TEXT:]]


def test_a_checkpoint_of_kimi_is_served(folder: Path, ranks: dict[bytes, int]) -> None:
    model = load_served_model(ModelSection(path=str(folder)))
    first = len(ranks)
    assert model.limits.eos_token_ids == (first + 1, first + 2)
    assert any("different ends" in remark for remark in model.remarks)
    assert "<|im_user|>" in model.tokenizer.control_tokens
    assert model.chat_template is not None
    prompt = model.chat_template.render([{"role": "user", "content": "the"}])
    ids = model.tokenizer.encode(prompt, add_special_tokens=False)
    turn = [first + 3, *model.tokenizer.encode("user", add_special_tokens=False), first + 5]
    assert ids[: len(turn)] == turn
    assert ids.count(first + 2) == 1
