"""The texts of a model's tokens, as far as grammars need them: read from its `tokenizer.json`.

Nobody is tokenized here. A piece is as the file spells it; how bytes are spelled in it says
`PieceEncoding`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError, InvalidRequestError
from runtime.tokenizer_file import tokenizer_file

_NO_TEXT = "\u00ff"
"""The letter of the byte 0xFF, which stands nowhere in UTF-8."""


class PieceEncoding(Enum):
    """How the pieces of a vocabulary spell bytes."""

    RAW = "raw"
    """They are text."""
    BYTE_FALLBACK = "byte_fallback"
    """Text with a mark for spaces, and pieces such as <0x0A> for single bytes (SentencePiece)."""
    BYTE_LEVEL = "byte_level"
    """A letter for every byte (GPT-2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What the tokens of a model stand for.

    Attributes:
        pieces: by token id, as many as the model knows; empty where the tokenizer has none.
        encoding: of all pieces.
        special: by id the texts of the tokens that are no text (turns, ends of sequences). Where
            pieces spell bytes, theirs begin with one that no text has: only a grammar that names
            such a token by its id takes it, and one that spells it takes the letters.
    """

    pieces: list[str]
    encoding: PieceEncoding
    special: Mapping[int, str]


def read_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """Read the tokenizer beside a checkpoint.

    Args:
        folder: of the model.
        vocab_size: of the model; ids beyond it cannot be sampled and are left out.

    Raises:
        InvalidRequestError: there is none, or it is of a kind that is not known here.
    """
    needs = "constraint.grammar needs the texts of the model's tokens"
    try:
        path = tokenizer_file(folder)
    except ConfigError as error:
        fix = "serve a model with a tokenizer, or ask without a grammar"
        raise InvalidRequestError(f"{needs}: {error}; or {fix}") from error
    try:
        content = json.loads(path.read_bytes())
        tokens = dict(_tokens(content["model"]))
        added = content.get("added_tokens") or ()
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise InvalidRequestError(
            f"{needs}, and {path} cannot be read "
            f"({type(error).__name__}: {error}): convert it with a current tokenizers"
        ) from error
    tokens |= {item["id"]: item["content"] for item in added}
    pieces = [""] * vocab_size
    for token_id, piece in tokens.items():
        if token_id < vocab_size:
            pieces[token_id] = piece
    special = {item["id"]: item["content"] for item in added if _is_control(item)}
    encoding = _encoding(content)
    if encoding is PieceEncoding.BYTE_LEVEL:
        for token_id in special:
            if token_id < vocab_size:
                pieces[token_id] = f"{_NO_TEXT}{token_id}"
    return Vocabulary(
        pieces=pieces,
        encoding=encoding,
        special={token_id: text for token_id, text in special.items() if token_id < vocab_size},
    )


def _is_control(added: Mapping[str, Any]) -> bool:
    """Special tokens, and tags: checkpoints leave some of their tags unmarked as special."""
    text = added["content"]
    return bool(added.get("special")) or (text.startswith("<") and text.endswith(">"))


def _tokens(model: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        yield from ((token_id, piece) for piece, token_id in vocabulary.items())
    else:  # Unigram: pieces with their scores, by id
        yield from ((token_id, piece) for token_id, (piece, _) in enumerate(vocabulary))


def _encoding(content: Mapping[str, Any]) -> PieceEncoding:
    decoders = set(_types(content.get("decoder")))
    if "ByteLevel" in decoders:
        return PieceEncoding.BYTE_LEVEL
    if "ByteFallback" in decoders or content["model"].get("byte_fallback"):
        return PieceEncoding.BYTE_FALLBACK
    return PieceEncoding.RAW


def _types(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _types(part)
