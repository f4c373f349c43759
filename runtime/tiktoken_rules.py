"""A ``tiktoken.model`` as the content of a ``tokenizer.json``: the same text becomes the same ids.

A line of ``tiktoken.model`` is a token, in base64, and its rank, which is its id. Text is split by
a regular expression; within a piece, the two neighbours are joined whose joint token has the lowest
rank, until no two of them are a token. A ``tokenizer.json`` ranks pairs instead of tokens, so every
pair that makes a token is listed, in the order of the tokens.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Final

NUM_SPECIAL: Final = 256
"""Ids behind the ranks; those that nobody names are reserved."""

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_OPENING = r"[^\r\n\p{L}\p{N}]?"
_NOT_HAN = r"&&[^\p{Han}]"
_UPPER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}]"
_LOWER = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NOT_HAN}]"
SPLIT: Final = "|".join(
    (
        r"[\p{Han}]+",
        f"{_OPENING}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_OPENING}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What Kimi's tokenizer takes for one piece."""

_AS_SPELLED = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    # A piece that is a token is that token, whatever its parts.
    "ignore_merges": True,
}


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Each token's rank.

    Raises:
        ValueError: a line is broken, or ranks are not 0, 1, 2 and so on, or a byte has none.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"line {number} is no token with its rank: {line[:40]!r}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("the ranks are not 0, 1, 2 and so on: lines are missing")
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise ValueError(f"the byte {absent[0]:#04x} has no rank")
    return ranks


def special_names(num_ranks: int, added: Mapping[str, object]) -> dict[str, tuple[int, bool]]:
    """The special tokens' texts, each with its id and whether it stays out of decoded text.

    Args:
        num_ranks: of tokens that have one.
        added: ``added_tokens_decoder`` of the settings: by id, objects with content and special.

    Raises:
        ValueError: two have one text.
    """
    names: dict[str, tuple[int, bool]] = {}
    for token_id in range(num_ranks, num_ranks + NUM_SPECIAL):
        entry = added.get(str(token_id))
        told = entry if isinstance(entry, dict) else {}
        name = str(told.get("content", f"<|reserved_token_{token_id}|>"))
        if name in names:
            raise ValueError(
                f"the special tokens {names[name][0]} and {token_id} are both {name!r}"
            )
        names[name] = (token_id, bool(told.get("special", True)))
    return names


def tokenizer_content(
    ranks: Mapping[bytes, int], special: Mapping[str, tuple[int, bool]]
) -> dict[str, object]:
    """The content of a ``tokenizer.json``.

    Args:
        ranks: see `read_ranks`.
        special: see `special_names`.

    Raises:
        ValueError: a special token is spelled as a common one.
    """
    letters = byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    for name in special:
        if name in vocab:
            raise ValueError(f"the special token {name!r} is a common token, too")
    by_rank = sorted(ranks, key=ranks.__getitem__)
    merges = [
        (spelled[first], spelled[second])
        for token in by_rank
        for first, second in _pairs(token, ranks)
    ]
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": name, "special": is_special, **_AS_SPELLED}
            for name, (token_id, is_special) in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, _BYTE_LEVEL]},
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {**_BPE, "vocab": vocab, "merges": merges},
    }


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100
    on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {byte: chr(byte) for byte in visible}
    hidden = sorted(set(range(256)) - visible)
    letters.update({byte: chr(0x100 + index) for index, byte in enumerate(hidden)})
    return letters


def _pairs(token: bytes, ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """What makes ``token``.

    In a run of one letter two of its pairs may overlap. What was joined first, from the left, is
    the longer part, so the pair that begins with the longer one goes before.
    """
    for cut in range(len(token) - 1, 0, -1):
        if token[:cut] in ranks and token[cut:] in ranks:
            yield token[:cut], token[cut:]
