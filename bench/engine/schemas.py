"""Schemas that bind the requests of a measurement, each another one, and outputs by them.

The grammars, their matchers and their masks are those of a worker. What is invented: the schemas,
the outputs so far of requests that begin in the middle, and, where the model has no tokenizer, its
vocabulary: the pieces of the bundled model, and pairs of them for all other ids.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from deploy.checkpoint.model_folder import BUNDLED_MODEL
from grammar.constraints import Compiler, Constraints
from grammar.matcher import Matcher, num_mask_words
from grammar.vocabulary import Vocabulary, read_vocabulary
from runtime.sampling import OutputConstraint, SamplingParams
from runtime.tokenizer_file import has_tokenizer

NUM_FIELDS: Final = 12
"""Of a schema."""
STRING_LENGTH: Final = 9
"""Tokens of a string about: its end is made that likely, or invented weights would never end it."""

STOP: Final = 1
"""The token after which an output may end: a special one of the bundled vocabulary."""
SHARE_OF_MARKS: Final = 0.04
"""Of invented pieces."""
_WORD: Final = re.compile(r"[^A-Za-z0-9]?[A-Za-z]+")  # a letter of its own stands for a space
_MARKS: Final = re.compile(r"[^\x00-\x7f]?[!-/:-@\[-`{-~]+")
_TYPES: Final[tuple[dict[str, Any], ...]] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["low", "middle", "high"]},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOutput:
    """An output in the middle.

    Attributes:
        sampling: of the request, with its constraint.
        matcher: told the tokens.
        token_ids: at least one.
    """

    sampling: SamplingParams
    matcher: Matcher
    token_ids: list[int]


class SchemaOutputs:
    """The outputs of requests that are bound by the schemas of their places."""

    def __init__(
        self,
        folder: str | Path,
        vocab_size: int,
        *,
        num_places: int,
        generator: random.Random,
        num_fields: int = NUM_FIELDS,
    ) -> None:
        """Compile the schemas; seconds.

        Args:
            folder: of the model; where it has no tokenizer, the vocabulary is invented.
            vocab_size: of the model.
            num_places: that many schemas.
            generator: of all that is drawn.
            num_fields: of a schema.
        """
        self._random, self._vocab_size, self.num_fields = generator, vocab_size, num_fields
        has_own = has_tokenizer(Path(folder))
        self.vocabulary = "the model's" if has_own else "the bundled model's, widened by pairs"
        """What the tokens stand for."""
        vocabulary = widened(
            read_vocabulary(Path(folder if has_own else BUNDLED_MODEL), vocab_size), generator
        )
        self._quote = vocabulary.pieces.index('"')

        def open_compiler(folder: Path, vocab_size: int) -> Compiler:
            from grammar.grammars import Grammars  # late: it brings xgrammar

            return Grammars(vocabulary)

        self._constraints = Constraints(folder, vocab_size, open_compiler=open_compiler)
        self._schemas = [draw_schema(place, num_fields, generator) for place in range(num_places)]
        waiting = [self._constraints.begin(self._bind(SamplingParams(), c)) for c in self._schemas]
        for matcher in waiting:
            matcher.result()

    def begin(self, place: int, sampling: SamplingParams, num_tokens: int) -> BoundOutput:
        """Make the output of a request, of so many tokens at most: it may end and begin anew."""
        sampling = self._bind(sampling, self._schemas[place])
        words = np.empty(num_mask_words(self._vocab_size), dtype=np.int32)
        matcher, token_ids = self._matcher(sampling), list[int]()
        for _ in range(num_tokens):
            matcher.fill(words)
            token_ids.append(choose_token(words, self._vocab_size, self._quote, self._random))
            matcher.follow(token_ids)
            assert matcher.error is None, matcher.error
            if matcher.is_over:
                matcher, token_ids = self._matcher(sampling), []
        if not token_ids:
            return self.begin(place, sampling, 1)
        return BoundOutput(sampling=sampling, matcher=matcher, token_ids=token_ids)

    def close(self) -> None:
        """End the threads that compile."""
        self._constraints.close()

    def _bind(self, sampling: SamplingParams, schema: OutputConstraint) -> SamplingParams:
        bias = math.log(max(self._vocab_size / STRING_LENGTH, 1.0))
        return dataclasses.replace(
            sampling,
            constraint=schema,
            stop_token_ids=(STOP,),
            logit_bias={self._quote: bias, **sampling.logit_bias},
        )

    def _matcher(self, sampling: SamplingParams) -> Matcher:
        matcher = self._constraints.begin(sampling).result()
        assert isinstance(matcher, Matcher)
        return matcher


def choose_token(
    words: np.ndarray[Any, np.dtype[np.int32]], vocab_size: int, quote: int, draw: random.Random
) -> int:
    """Draw a token that a mask leaves; the quote, where it may come, as often as strings end."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size)
    if bits[quote] and draw.randrange(STRING_LENGTH) == 0:
        return quote
    choices = np.flatnonzero(bits)
    return int(choices[draw.randrange(len(choices))])


def draw_schema(number: int, num_fields: int, draw: random.Random) -> OutputConstraint:
    """An object of so many fields, all required, with the number in their names."""
    import xgrammar

    names = [f"field_{number}_{place}" for place in range(num_fields)]
    schema = {
        "type": "object",
        "properties": {name: draw.choice(_TYPES) for name in names},
        "required": names,
        "additionalProperties": False,
    }
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    return OutputConstraint(grammar=grammar.serialize_json())


def widened(vocabulary: Vocabulary, draw: random.Random) -> Vocabulary:
    """The same with pairs of pieces for all ids that have none.

    Pairs are such as tokenizers make: two parts of one word, or marks behind marks. What a mask
    costs depends on how many pieces go on behind a quote, as a matcher has to try these one by one:
    1.2 % of them, as in vocabularies of 100,000 pieces that are in use.
    """
    pieces = list(vocabulary.pieces)
    special = set(vocabulary.special.values())
    texts = [piece for piece in pieces if piece and piece not in special]
    words = [piece for piece in texts if _WORD.fullmatch(piece)]
    marks = [piece for piece in texts if _MARKS.fullmatch(piece)]
    kinds = (
        (words, [piece for piece in words if piece.isalpha() and piece.isascii()]),
        (marks, [piece for piece in marks if piece.isascii()]),
    )
    known = set(pieces)
    for token_id, piece in enumerate(pieces):
        while not piece:
            firsts, seconds = kinds[draw.random() < SHARE_OF_MARKS]
            pair = draw.choice(firsts) + draw.choice(seconds)
            if pair not in known:
                known.add(pair)
                pieces[token_id] = piece = pair
    return Vocabulary(pieces=pieces, encoding=vocabulary.encoding, special=vocabulary.special)
