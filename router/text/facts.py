"""What a checkpoint's files say of its texts: joined or ranked as transformers does, and told.

Publishers write one fact into several files, and forget some of them when it changes. A wrong end
of sequence costs most: the answer goes on to its limit. So answers end with what any file names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from router.text.checkpoint_files import (
    OLD_SETTINGS,
    SETTINGS,
    added_tokens,
    read_json,
    special_tokens,
    token_content,
)
from router.text.template_files import overruled_templates
from router.text.tokenizer import Tokenizer
from runtime.errors import ConfigError

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_NO_LIMIT = 10**9
"""A context beyond it is how transformers writes that there is none."""

Sources = dict[int, list[str]]
"""Which files name a token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFacts:
    """Of one checkpoint."""

    eos_token_ids: tuple[int, ...]
    """Any of them ends an answer."""
    remarks: tuple[str, ...]
    """Sentences about what was joined, and about what does not count."""


def read_text_facts(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> TextFacts:
    """What the files of a checkpoint say of its texts.

    Raises:
        ConfigError: a file is broken, or the tokenizer has ids that the model has not.
    """
    _check_ids(folder, tokenizer, vocab_size)
    eos, bos, pad = (_sources(folder, tokenizer, f"{name}_token") for name in ("eos", "bos", "pad"))
    outside = sorted(token_id for token_id in eos if not 0 <= token_id < vocab_size)
    ends = {token_id: files for token_id, files in eos.items() if token_id not in outside}
    remarks = [
        *_of_ends(ends, tokenizer),
        *(
            f"the eos_token_id {token_id} of {_files(eos[token_id])} is no token"
            for token_id in outside
        ),
        *_of_others("bos", bos, "what the tokenizer and the chat template write counts"),
        *_of_others("pad", pad, "sequences are not padded here"),
        *_of_beginning(folder, tokenizer),
        *_of_added(folder, tokenizer),
        *_of_length(folder),
        *overruled_templates(folder),
    ]
    return TextFacts(eos_token_ids=tuple(sorted(ends)), remarks=tuple(remarks))


def _check_ids(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    num_ids = len(tokenizer.vocabulary.pieces)
    if num_ids <= vocab_size:
        return
    beyond = [repr(tokenizer.entry(token_id)) for token_id in range(vocab_size, num_ids)]
    raise ConfigError(
        "model.path",
        str(folder),
        f"the tokenizer has the ids 0 to {num_ids - 1}, and the model only those below "
        f"vocab_size = {vocab_size} of {_CONFIG}; beyond it {', '.join(beyond[:3])}"
        + (f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""),
        "the tokenizer of this checkpoint, without tokens that were added to it",
    )


def _sources(folder: Path, tokenizer: Tokenizer, name: str) -> Sources:
    """The ids of one special token, such as "eos_token", in the order of the files."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for file in (_CONFIG, _GENERATION):
        value = read_json(folder / file).get(f"{name}_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool):
                found[token_id].append(file)
            elif token_id is not None:
                problem = f"{name}_id holds {token_id!r}"
                raise ConfigError("model.path", str(folder / file), problem, "token ids")
    text = special_tokens(folder).get(name)
    of_text = tokenizer.token_id(text) if text else None
    if of_text is not None:
        is_old = token_content(read_json(folder / SETTINGS).get(name)) != text
        found[of_text].append(OLD_SETTINGS if is_old else SETTINGS)
    return dict(found)


def _files(files: list[str]) -> str:
    return " and ".join(dict.fromkeys(files))


def _of_ends(ends: Sources, tokenizer: Tokenizer) -> Iterator[str]:
    if not ends:
        yield "no file names a token that ends an answer: each goes on to its limit"
    texts = {token_id: repr(tokenizer.vocabulary.token_text(token_id)) for token_id in sorted(ends)}
    if len({tuple(files) for files in ends.values()}) > 1:
        told = (f"{token_id} {text} ({_files(ends[token_id])})" for token_id, text in texts.items())
        yield f"the files name different ends of an answer, any of which ends it: {', '.join(told)}"
    for token_id, text in texts.items():
        if token_id not in tokenizer.vocabulary.special_ids:
            yield f"an answer ends with {token_id} {text}, which is no special token"


def _of_others(name: str, sources: Sources, what_counts: str) -> Iterator[str]:
    if len(sources) > 1:
        told = ", ".join(f"{token_id} ({_files(files)})" for token_id, files in sources.items())
        yield f"the files name different {name}_token_ids: {told}; {what_counts}"


def _of_beginning(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    adds = read_json(folder / SETTINGS).get("add_bos_token")
    text = special_tokens(folder).get("bos_token")
    if adds and (text is None or tokenizer.token_id(text) is None):
        yield f"{SETTINGS} asks for a bos_token before texts (add_bos_token), and there is none"
    elif adds is False and text is not None:
        first = tokenizer.encode("a", add_special_tokens=True)[:1]
        if first == [tokenizer.token_id(text)]:
            yield f"{SETTINGS} says add_bos_token = false, and tokenizer.json adds it: that counts"


def _of_added(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    for token_id, (text, _) in sorted(added_tokens(folder).items()):
        found = tokenizer.token_id(text)
        if found != token_id:
            yield f"{text!r} is the added token {token_id} by its own file, and {found} here"


def _of_length(folder: Path) -> Iterator[str]:
    told = read_json(folder / SETTINGS).get("model_max_length")
    context = read_json(folder / _CONFIG).get("max_position_embeddings")
    if isinstance(told, int) and told < _NO_LIMIT and told != context:
        yield (
            f"{SETTINGS} says model_max_length = {told}; "
            f"max_position_embeddings = {context} of {_CONFIG} counts"
        )
