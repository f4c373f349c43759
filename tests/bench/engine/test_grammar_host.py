"""The measurement of grammars runs, and measures what it says."""

from __future__ import annotations

import random

import pytest

from bench.engine.grammar_host import GrammarHost
from bench.engine.schemas import widened
from deploy.checkpoint.model_folder import BUNDLED_MODEL
from grammar.vocabulary import read_vocabulary

pytestmark = pytest.mark.nightly


def test_every_part_of_a_step_and_of_a_request_is_measured() -> None:
    host = GrammarHost(num_rows=3, num_fields=2, vocab_size=4200)
    for _ in range(5):
        host.step()
    host.constraints.close()
    assert len(host.seconds["compile"]) == 3  # each row has a schema of its own
    assert len(host.seconds["begin"]) >= 3
    assert [len(host.seconds[part]) for part in ("fill", "fill_cpu", "take")] == [5, 5, 5]
    assert {"fill", "fill_cpu", "take", "compile", "begin", "fill_most"} <= set(host.report())


def test_a_widened_vocabulary_has_a_piece_of_its_own_for_every_id() -> None:
    narrow = read_vocabulary(BUNDLED_MODEL, 4300)
    wide = widened(narrow, random.Random(1))
    assert wide.pieces[:4096] == narrow.pieces[:4096]
    assert all(wide.pieces)
    assert len(set(wide.pieces)) == 4300


def test_as_many_pieces_go_on_behind_a_quote_as_in_vocabularies_that_are_in_use() -> None:
    wide = widened(read_vocabulary(BUNDLED_MODEL, 60000), random.Random(1))
    share = sum('"' in piece[:-1] for piece in wide.pieces) / len(wide.pieces)
    assert 0.010 < share < 0.014
