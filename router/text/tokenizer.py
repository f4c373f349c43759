"""The checkpoint's tokenizer: text to ids, ids to bytes. The only file that imports ``tokenizers``.

Key idea: the decoder of a byte-level vocabulary is a table from id to bytes, made once at load;
decoding then needs no library (see ``router.text.detokenizer``). A tokenizer of another kind is
refused at load. Encoding is for threads (``router.text.lanes``): a long prompt takes seconds.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from router.text.checkpoint_files import SETTINGS, added_tokens, read_json, special_tokens
from router.text.pieces import Pieces
from runtime.errors import ConfigError
from runtime.tiktoken_rules import byte_letters
from runtime.tokenizer_file import is_made_of_ranks, tokenizer_file

BATCH_TEXTS = 256
"""Texts handed to the library at once: their results are turned into ours without the library
letting go of the interpreter."""
SHORT_CHARS = 1024
"""A shorter text is encoded where it is: the library's threads would take longer to wake."""
NORMALIZER_SHRINKS = 4
"""A normalizer joins at most so many characters to one (combining marks, Hangul)."""
LONG_TEXT, LONG_RUN = 400_000, 25_000
"""Characters; see `cut_text`."""
_RUN = re.compile(r"\s+|\S+")


def _token_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    """What a vocabulary entry stands for; one outside the alphabet is plain text (added tokens)."""
    try:
        return bytes(alphabet[char] for char in token)
    except KeyError:
        return token.encode()


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The bytes of every token, by id."""

    pieces: Pieces
    visible_pieces: Pieces
    """The same with special tokens empty."""
    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id beyond the tokenizer's."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are not UTF-8 by themselves become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_name(self, token_id: int) -> str:
        r"""One token as a name that no other has: its text, or ``bytes:\x..`` where not UTF-8."""
        piece = self.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Tokenizer:
    """Encodes text as the checkpoint was trained to read it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        cuts_long_runs: bool = False,
    ) -> None:
        """``bos_token`` is put before a text that asks for special tokens and lacks it.

        ``cuts_long_runs``: see `cut_text`.
        """
        # A tokenizer.json may ask for both; a prompt is encoded as it is, or refused.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_id: int | None = backend.token_to_id(bos_token) if bos_token else None
        self._cuts_long_runs = cuts_long_runs
        self.vocabulary = _vocabulary(backend)
        self.control_tokens = _control_tokens(backend)
        """The texts that encode as one control token wherever they stand."""
        longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self._chars_per_token = longest * (NORMALIZER_SHRINKS if backend.normalizer else 1)

    @classmethod
    def from_dir(cls, folder: Path) -> Tokenizer:
        """Read ``tokenizer.json`` and ``tokenizer_config.json`` of a checkpoint.

        Raises:
            ConfigError: a file is missing or broken, or the tokenizer is not byte-level.
        """
        path = tokenizer_file(folder)
        try:
            decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder")
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            fix = "a checkpoint folder with a readable tokenizer.json"
            raise ConfigError("model.path", str(folder), f"{path.name}: {error}", fix) from error
        if not _is_byte_level(decoder):
            problem = f"tokenizer.json has the decoder {decoder!r}"
            raise ConfigError("model.path", str(folder), problem, "a byte-level BPE tokenizer")
        unknown = getattr(backend.model, "unk_token", None)
        if unknown is not None and backend.model.token_to_id(unknown) is None:
            problem = f"{path.name} has model.unk_token {unknown!r}, which its vocab lacks"
            raise ConfigError("model.path", str(folder), problem, "a vocab with this token")
        _add_tokens(backend, folder)
        adds_bos = read_json(folder / SETTINGS).get("add_bos_token")
        bos = special_tokens(folder).get("bos_token") if adds_bos else None
        return cls(backend, bos_token=bos, cuts_long_runs=is_made_of_ranks(folder))

    def most_chars(self, num_tokens: int) -> int:
        """A longer text cannot be ``num_tokens`` tokens, whatever it says."""
        return num_tokens * self._chars_per_token

    def count(self, text: str) -> int:
        """How many tokens ``text`` is, by itself."""
        return len(self._backend.encode_batch_fast([text], add_special_tokens=False)[0])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of ``text``."""
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> list[list[int]]:
        """The ids of each text.

        Other threads run meanwhile, unless it is one short text: the library's function for batches
        lets go of the interpreter, the one for a single text does not in every version.

        Args:
            texts: to encode, each by itself.
            add_special_tokens: whether the library's, and bos, are put before each.
            is_abandoned: nobody waits for the result any more; what it is then does not matter.
        """
        if not self._cuts_long_runs or max(map(len, texts), default=0) <= LONG_RUN:
            batches = self._batches(texts, add_special_tokens, is_abandoned)
            return [self._with_bos(ids, add_special_tokens) for ids in batches]
        cut = [cut_text(text) for text in texts]
        ids_of = self._batches(list(itertools.chain(*cut)), add_special_tokens, is_abandoned)
        return [
            self._with_bos(
                list(itertools.chain(*itertools.islice(ids_of, len(pieces)))), add_special_tokens
            )
            for pieces in cut
        ]

    def _batches(
        self, texts: Sequence[str], add_special_tokens: bool, is_abandoned: Callable[[], bool]
    ) -> Iterator[list[int]]:
        """The ids of each text, as the library has them; of fewer when nobody waits any more."""
        if len(texts) == 1 and len(texts[0]) <= SHORT_CHARS:
            yield self._backend.encode(texts[0], add_special_tokens=add_special_tokens).ids
            return
        for start in range(0, len(texts), BATCH_TEXTS):
            if is_abandoned():
                return
            batch = self._backend.encode_batch_fast(
                texts[start : start + BATCH_TEXTS], add_special_tokens=add_special_tokens
            )
            yield from (encoding.ids for encoding in batch)

    def _with_bos(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        """``ids``, behind bos if they ask for special tokens and lack it."""
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def entry(self, token_id: int) -> str | None:
        """One vocabulary entry as tokenizer.json spells it; None beyond the tokenizer's ids."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def token_id(self, token: str) -> int | None:
        """The id of one vocabulary entry."""
        found: int | None = self._backend.token_to_id(token)
        return found


def _vocabulary(backend: tokenizers.Tokenizer) -> Vocabulary:
    alphabet = {letter: byte for byte, letter in byte_letters().items()}
    tokens: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(tokens.values(), default=-1) + 1)
    for token, token_id in tokens.items():
        pieces[token_id] = _token_bytes(token, alphabet)
    visible = list(pieces)
    special = set()
    for token_id, added in backend.get_added_tokens_decoder().items():
        if added.special:
            special.add(token_id)
            visible[token_id] = b""
    return Vocabulary(
        pieces=Pieces(pieces), visible_pieces=Pieces(visible), special_ids=frozenset(special)
    )


def _control_tokens(backend: tokenizers.Tokenizer) -> tuple[str, ...]:
    """Special tokens, and tags: checkpoints leave some of their tags unmarked as special."""
    added = backend.get_added_tokens_decoder().values()
    return tuple(
        token.content
        for token in added
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    )


def cut_text(text: str) -> list[str]:
    """``text`` in the pieces that Kimi's tokenizer reads by themselves.

    It cuts what is longer than `LONG_TEXT`, and runs without white space, or of it, that are longer
    than `LONG_RUN`.
    """
    pieces = []
    for start in range(0, len(text), LONG_TEXT):
        part = text[start : start + LONG_TEXT]
        begin = 0
        for run in _RUN.finditer(part):
            for end in range(run.start() + LONG_RUN, run.end(), LONG_RUN):
                pieces.append(part[begin:end])
                begin = end
        pieces.append(part[begin:])
    return pieces


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Add the tokens that other files name and tokenizer.json lacks, as transformers does."""
    for _, (text, is_special) in sorted(added_tokens(folder).items()):
        if backend.token_to_id(text) is None:
            token = tokenizers.AddedToken(text, special=is_special, normalized=False)
            add = backend.add_special_tokens if is_special else backend.add_tokens
            add([token])
