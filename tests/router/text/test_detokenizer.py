"""Text piece by piece equals the whole text, and no piece has half a character."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from router.text.output import ChoiceText, OutputOptions
from router.text.pieces import Pieces
from router.text.tokenizer import Tokenizer, Vocabulary
from runtime.errors import ConfigError
from runtime.pb import common_pb2
from runtime.sampling import FinishReason
from tests.router.conftest import SPECIAL, train_tokenizer

BACKEND = train_tokenizer()
TOKENIZER = Tokenizer(BACKEND)
VOCABULARY = TOKENIZER.vocabulary
IDS = st.lists(st.integers(0, BACKEND.get_vocab_size() - 1), max_size=40)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def texts(pieces, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(pieces)
    return [detokenizer.feed(token_id) for token_id in ids] + [detokenizer.flush()]


@given(IDS)
def test_pieces_add_up_to_the_whole_decode(ids: list[int]) -> None:
    whole = BACKEND.decode(ids, skip_special_tokens=True)
    assert "".join(texts(VOCABULARY.visible_pieces, ids)) == whole
    shown = BACKEND.decode(ids, skip_special_tokens=False)
    assert "".join(texts(VOCABULARY.pieces, ids)) == shown


@given(IDS, st.lists(st.integers(0, 5)))
def test_the_text_does_not_depend_on_how_many_tokens_come_together(
    ids: list[int], sizes: list[int]
) -> None:
    together = Detokenizer(VOCABULARY.pieces)
    parts = [together.feed_all(part) for part in deltas(ids, sizes)]
    assert "".join([*parts, together.flush()]) == "".join(texts(VOCABULARY.pieces, ids))
    assert together.flush() == ""


@given(TEXT)
def test_encode_then_decode_gives_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert "".join(texts(VOCABULARY.pieces, ids)) == text
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in texts(VOCABULARY.pieces, ids))


@given(TEXT, st.booleans())
def test_a_text_has_the_same_ids_alone_and_among_others(text: str, special: bool) -> None:
    tokenizer = Tokenizer(BACKEND, bos_token=SPECIAL[0])
    (alone,) = tokenizer.encode_all([text], add_special_tokens=special)
    assert tokenizer.encode_all([text, "fox"], add_special_tokens=special)[0] == alone
    assert (alone[:1] == [tokenizer.token_id(SPECIAL[0])]) >= special


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert texts(VOCABULARY.pieces, [10**6]) == ["", ""]
    known = TOKENIZER.encode("fox", add_special_tokens=False)
    assert Detokenizer(VOCABULARY.pieces).feed_all([10**6, *known, 10**6]) == "fox"
    assert VOCABULARY.token_text(10**6) == ""


def test_token_names_are_unique() -> None:
    names = [VOCABULARY.token_name(i) for i in range(len(VOCABULARY.pieces))]
    assert len(set(names)) == len(names)
    assert {names[i] for i in VOCABULARY.special_ids} == set(SPECIAL)


def lp(value: int) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(logprob=-float(value))


def deltas(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts, rest = [], list(ids)
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    return [part for part in (*parts, rest) if part]


@settings(max_examples=200)
@given(TEXT, st.lists(st.integers(1, 5)), st.lists(st.text("ab \n", min_size=1, max_size=3)))
def test_a_choice_is_the_same_however_its_tokens_arrive(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    options = OutputOptions(stops=stops, keep_tokens=True)

    def collect(parts: list[list[int]]) -> tuple[str, list[int], list[float], str | None, int]:
        choice = ChoiceText(VOCABULARY, options)
        got_text, got_ids, got_logprobs, finish = "", [], [], None
        for number, part in enumerate(parts):
            end = FinishReason.LENGTH if number == len(parts) - 1 else None
            piece = choice.feed(part, [lp(i) for i in part], end)
            if piece is not None:
                got_text += piece.text
                got_ids += piece.token_ids
                got_logprobs += [p.logprob for p in piece.logprobs]
                finish = piece.finish_reason
            if choice.finished:
                break
        return got_text, got_ids, got_logprobs, finish, choice.num_tokens

    one_by_one = collect([[i] for i in ids] or [[]])
    assert collect(deltas(ids, sizes) or [[]]) == one_by_one
    found_text, found_ids, found_logprobs, finish, num_tokens = one_by_one
    ends = [text.index(stop) for stop in stops if stop in text]
    assert finish == ("stop" if ends else "length")
    assert text.startswith(found_text)
    assert found_ids == ids[:num_tokens]
    assert found_logprobs == [-float(i) for i in found_ids]


def test_a_stop_token_counts_and_has_no_text() -> None:
    ids = [*TOKENIZER.encode("fox", add_special_tokens=False), 1]
    choice = ChoiceText(VOCABULARY, OutputOptions(skip_special_tokens=False))
    piece = choice.feed(ids, [], FinishReason.STOP)
    assert piece is not None
    assert (piece.text, piece.finish_reason, choice.num_tokens) == ("fox", "stop", len(ids))


def test_stop_strings_wait_for_min_tokens() -> None:
    choice = ChoiceText(VOCABULARY, OutputOptions(stops=["a"], min_tokens=2))
    token = TOKENIZER.token_id("a")
    assert token is not None
    pieces = [choice.feed([token], [], None) for _ in range(3)]
    assert [p.text if p else None for p in pieces] == ["a", "a", ""]
    assert choice.finished


def test_another_kind_of_tokenizer_is_refused(tmp_path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="byte-level"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_vocabulary_is_a_plain_value() -> None:
    pieces = Pieces([b"\xc3"])
    vocabulary = Vocabulary(pieces=pieces, visible_pieces=pieces, special_ids=frozenset())
    assert vocabulary.token_text(0) == "\ufffd"
    assert vocabulary.token_name(0) == "bytes:\\xc3"


@given(st.lists(IDS.map(tuple)), st.booleans())
def test_what_is_known_of_an_id_alone_is_what_feeding_it_says(
    parts: list[tuple[int, ...]], skip_special_tokens: bool
) -> None:
    """Whoever takes the JSON of a token as it is, and feeds all others, tells the same text."""
    options = OutputOptions(skip_special_tokens=skip_special_tokens)
    quick, fed = ChoiceText(VOCABULARY, options), ChoiceText(VOCABULARY, options)
    for token_ids in parts:
        whole = fed.feed(token_ids, [], None)
        said = b""
        for token_id in token_ids:
            known = quick.json_pieces[token_id] if quick.json_pieces is not None else None
            if known is not None:
                quick.num_tokens += 1
            else:
                piece = quick.feed([token_id], [], None)
                known = orjson.dumps(piece.text)[1:-1] if piece is not None else b""
            said += known
        assert orjson.loads(b'"%b"' % said) == (whole.text if whole is not None else "")
        assert quick.num_tokens == fed.num_tokens
    ends = [text.feed([], [], FinishReason.LENGTH) for text in (quick, fed)]
    assert ends[0] == ends[1]
    assert quick.json_pieces is None


def test_nothing_is_known_of_an_id_where_more_is_wanted_than_its_text() -> None:
    plain = ChoiceText(VOCABULARY, OutputOptions())
    assert plain.json_pieces is not None
    assert plain.json_pieces[10**6] is None
    assert 10**6 not in plain.json_pieces
    assert ChoiceText(VOCABULARY, OutputOptions(stops=["a"])).json_pieces is None
    assert ChoiceText(VOCABULARY, OutputOptions(keep_tokens=True)).json_pieces is None


def test_an_unknown_token_that_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    content = orjson.loads(BACKEND.to_str())
    content["model"]["unk_token"] = "<unk?>"
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(content))
    with pytest.raises(ConfigError, match=r"model\.unk_token '<unk\?>', which its vocab lacks"):
        Tokenizer.from_dir(tmp_path)
