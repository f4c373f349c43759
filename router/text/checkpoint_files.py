"""The JSON files of a checkpoint that say something of texts, and the tokens that they name."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.errors import ConfigError
from runtime.parsing import parse_json

SETTINGS, OLD_SETTINGS = "tokenizer_config.json", "special_tokens_map.json"
_ADDED = "added_tokens_decoder"
_ID = re.compile(r"[0-9]{1,9}")


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file, empty where there is no such file.

    Raises:
        ConfigError: the file is no JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            "model.path", str(path), f"no valid JSON: {error}", "mend the file"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("model.path", str(path), "is no JSON object", "mend the file")
    return value


def token_content(token: object) -> str | None:
    """A token as tokenizer_config.json writes it: a string or an object with content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the checkpoint's special tokens by name, such as ``bos_token``; templates read
    them as variables.

    ``special_tokens_map.json`` counts only where the settings list no added tokens: files of that
    age keep them there.

    Raises:
        ConfigError: a file is no JSON object.
    """
    settings = read_json(folder / SETTINGS)
    if _ADDED not in settings:
        settings = {**settings, **read_json(folder / OLD_SETTINGS)}
    named = {
        name: token_content(value) for name, value in settings.items() if name.endswith("_token")
    }
    return {name: text for name, text in named.items() if text}


def added_tokens(folder: Path) -> dict[int, tuple[str, bool]]:
    """The tokens by id that a checkpoint adds to its vocabulary; each with whether it is special.

    Of the settings, or of an older checkpoint's ``added_tokens.json``.

    Raises:
        ConfigError: a file is no JSON object, or has something else for a token.
    """
    listed = read_json(folder / SETTINGS).get(_ADDED)
    if listed is None:
        special = frozenset(special_tokens(folder).values())
        old = read_json(folder / "added_tokens.json")
        listed = {str(token_id): {"content": text} for text, token_id in old.items()}
    else:
        special = frozenset()
    found = {}
    for token_id, entry in listed.items() if isinstance(listed, dict) else [(None, None)]:
        text = token_content(entry)
        if not text or not _ID.fullmatch(str(token_id)):
            problem = f"has {token_id!r}: {entry!r} among the added tokens"
            raise ConfigError("model.path", str(folder), problem, "mend the file")
        is_special = text in special or bool(isinstance(entry, dict) and entry.get("special"))
        found[int(str(token_id))] = (text, is_special)
    return found
