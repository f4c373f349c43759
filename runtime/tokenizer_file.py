"""Where a checkpoint's ``tokenizer.json`` is; one that has only a ``tiktoken.model`` gets one.

It is made once and kept beside the checkpoint, or in the cache folder where that cannot be written.
Its name says what it was made of, so that it is made anew when that changes; it appears whole or
not at all, whoever else makes it at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Final

from runtime.errors import ConfigError
from runtime.parsing import parse_json
from runtime.tiktoken_rules import read_ranks, special_names, tokenizer_content

TOKENIZER, TIKTOKEN = "tokenizer.json", "tiktoken.model"
SETTINGS: Final = "tokenizer_config.json"
_KIMI: Final = "TikTokenTokenizer"
_VERSION: Final = 1
"""Of the way in which files are made."""


def has_tokenizer(folder: Path) -> bool:
    """Whether a checkpoint has a tokenizer that can be read."""
    return (folder / TOKENIZER).exists() or (folder / TIKTOKEN).exists()


def is_made_of_ranks(folder: Path) -> bool:
    """Whether a checkpoint's ``tokenizer.json`` is one that is made here."""
    return not (folder / TOKENIZER).exists() and (folder / TIKTOKEN).exists()


def tokenizer_file(folder: Path) -> Path:
    """The path of a checkpoint's ``tokenizer.json``, which is made where it can be.

    Raises:
        ConfigError: there is no tokenizer, or a broken one, or one whose rules are not known here,
            or no place to keep what is made of it.
    """
    if not has_tokenizer(folder):
        problem = f"holds no {TOKENIZER}, and no {TIKTOKEN}"
        raise ConfigError("model.path", str(folder), problem, "a complete checkpoint folder")
    if not is_made_of_ranks(folder):
        return folder / TOKENIZER
    try:
        ranks = (folder / TIKTOKEN).read_bytes()
        settings = parse_json((folder / SETTINGS).read_text(encoding="utf-8"))
        kind, added = settings.get("tokenizer_class"), settings.get("added_tokens_decoder") or {}
    except (OSError, ValueError, AttributeError) as error:
        raise _refusal(folder, f"{TIKTOKEN} needs {SETTINGS}: {error}") from error
    if kind != _KIMI:
        raise _refusal(folder, f"{SETTINGS} says tokenizer_class = {kind!r}, not {_KIMI!r}")
    told = json.dumps([_VERSION, added], sort_keys=True).encode()
    name = f"tokenizer-{hashlib.sha256(ranks + told).hexdigest()[:16]}.json"
    places = (folder, _cache())
    for place in places:
        if (place / name).exists():
            return place / name
    try:
        table = read_ranks(ranks)
        content = tokenizer_content(table, special_names(len(table), added))
    except (ValueError, AttributeError) as error:
        raise _refusal(folder, f"{TIKTOKEN}: {error}") from error
    return _keep(json.dumps(content, ensure_ascii=False).encode(), name, places)


def _refusal(folder: Path, problem: str) -> ConfigError:
    fix = f"download the checkpoint again, or one with a {TOKENIZER}"
    return ConfigError("model.path", str(folder), problem, fix)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tandem" / "tokenizers"


def _keep(content: bytes, name: str, places: tuple[Path, ...]) -> Path:
    """Write a file to the first place that takes it; its path."""
    problems = []
    for place in places:
        try:
            _write(place / name, content)
        except OSError as error:
            problems.append(f"{place} ({error.strerror})")
        else:
            return place / name
    raise ConfigError(
        "model.path",
        str(places[0]),
        f"no place to keep the {TOKENIZER} that is made of {TIKTOKEN}: {', '.join(problems)}",
        "let one of them be written, or set XDG_CACHE_HOME to a folder that can be",
    )


def _write(target: Path, content: bytes) -> None:
    """Write a file that is there when it is whole, and not before."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
