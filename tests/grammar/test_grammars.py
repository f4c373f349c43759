"""Grammars of JSON schemas over the bundled model's vocabulary: every sampled output is one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from grammar.constraints import Constraints
from grammar.matcher import num_mask_words
from grammar.vocabulary import PieceEncoding, read_vocabulary
from runtime.errors import InvalidRequestError
from runtime.sampling import OutputConstraint, SamplingParams
from tests.grammar.schemas import (
    EOS,
    MODEL_DIR,
    VOCAB,
    Writer,
    grammar_of,
    random_schema,
    serialized,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.constraints.close()


def check_schemas(seeds: range, writer: Writer, tokenizer: Tokenizer) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in seeds]
    outputs = writer.write([grammar_of(schema) for schema in schemas], seeds.start)
    for schema, output in zip(schemas, outputs, strict=True):
        text = tokenizer.decode(output, skip_special_tokens=False)
        # Not strict: in strings of a limited length xgrammar lets control characters pass, and
        # halves of surrogate pairs, which random logits draw and count as one character there.
        instance = json.loads(text, strict=False)
        if "\ufffd" not in text:
            jsonschema.validate(instance, schema)


def test_what_is_sampled_under_a_schema_is_an_instance_of_it(
    writer: Writer, tokenizer: Tokenizer
) -> None:
    check_schemas(range(100), writer, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 2100, 100))
def test_what_is_sampled_under_two_thousand_schemas_is_an_instance_of_each(
    writer: Writer, tokenizer: Tokenizer, first: int
) -> None:
    check_schemas(range(first, first + 100), writer, tokenizer)


def test_a_replayed_output_leaves_the_same_tokens(writer: Writer) -> None:
    grammar = grammar_of(random_schema(random.Random(4)))
    (output,) = writer.write([grammar], 4)
    params = SamplingParams(stop_token_ids=(EOS,), constraint=OutputConstraint(grammar=grammar))
    step_by_step = writer.matcher(params)
    words = np.zeros((2, num_mask_words(VOCAB)), dtype=np.int32)
    for length in range(len(output)):
        step_by_step.follow(output[:length])
        anew = writer.matcher(params, output[:length])
        step_by_step.fill(words[0])
        anew.fill(words[1])
        assert (words[0] == words[1]).all()


def test_special_tokens_come_where_the_grammar_names_them(writer: Writer) -> None:
    vocabulary = read_vocabulary(MODEL_DIR, VOCAB)
    user, call = 3, 7
    assert vocabulary.special[call] == "<\uff5ctool\u2581calls\u2581begin\uff5c>"

    def first_tokens(grammar: str) -> set[int]:
        matcher = writer.matcher(
            SamplingParams(constraint=OutputConstraint(grammar=serialized(grammar)))
        )
        words = np.zeros(num_mask_words(VOCAB), dtype=np.int32)
        matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    assert not first_tokens("root ::= [^a]+") & set(vocabulary.special)
    text = '"<\\uff5ctool\\u2581calls\\u2581begin\\uff5c>"'
    assert call not in first_tokens(f"root ::= [^a]+ | {text}")
    named = first_tokens(f"root ::= [^a]+ | {text} | Token({call})")
    assert call in named
    assert user not in named


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root ::= [a]", "JSON"),
        (
            serialized('root ::= "a"').replace('"root_rule_id":0', '"root_rule_id":7'),
            "root_rule_id 7",
        ),
        (serialized('root ::= "a"').replace('"__VERSION__":"v', '"__VERSION__":"v9'), "ersion"),
    ],
)
def test_a_grammar_that_is_none_is_refused_with_the_reason(
    writer: Writer, grammar: str, reason: str
) -> None:
    params = SamplingParams(constraint=OutputConstraint(grammar=grammar))
    with pytest.raises(InvalidRequestError, match=r"constraint\.grammar") as caught:
        writer.constraints.begin(params).result()
    assert reason in caught.value.message


def test_an_output_that_is_none_of_the_grammar_cannot_be_continued(
    writer: Writer, tokenizer: Tokenizer
) -> None:
    params = SamplingParams(
        constraint=OutputConstraint(grammar=serialized('root ::= "yes" | "no"'))
    )
    whole = tokenizer.encode("yes", add_special_tokens=False).ids
    with pytest.raises(InvalidRequestError, match=r"none of constraint\.grammar's"):
        writer.constraints.begin(params, [7]).result()
    with pytest.raises(InvalidRequestError, match="the request was over"):
        writer.constraints.begin(params, whole).result()


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    padded = VOCAB + 40
    constraints = Constraints(MODEL_DIR, padded)
    params = SamplingParams(constraint=OutputConstraint(grammar=serialized("root ::= [^a]+")))
    matcher = constraints.begin(params).result()
    constraints.close()
    assert matcher is not None
    words = np.zeros(num_mask_words(padded), dtype=np.int32)
    matcher.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert bits[:VOCAB].any()
    assert not bits[VOCAB:padded].any()


def test_the_bundled_tokenizer_spells_bytes() -> None:
    vocabulary = read_vocabulary(MODEL_DIR, VOCAB)
    assert vocabulary.encoding is PieceEncoding.BYTE_LEVEL
    assert len(vocabulary.pieces) == VOCAB
    assert vocabulary.special[EOS] == "<\uff5cend\u2581of\u2581sentence\uff5c>"
