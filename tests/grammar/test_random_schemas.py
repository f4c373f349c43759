"""Whatever a schema says: what comes to an end under its grammar parses, and is valid."""

from __future__ import annotations

import random

import pytest

from grammar.compile_process import NoDocumentError
from tests.grammar.random_schemas import RandomSchemas
from tests.grammar.walks import walk


def finished_share(seeds: range) -> float:
    """Of the schemas, those with an answer that came to an end; each of them was valid."""
    num_finished = 0
    for seed in seeds:
        try:
            num_finished += walk(RandomSchemas(seed).schema(), random.Random(seed)) > 0
        except NoDocumentError:
            continue
    return num_finished / len(seeds)


def test_answers_to_random_schemas_are_valid() -> None:
    assert finished_share(range(120)) > 0.95


@pytest.mark.nightly
def test_answers_to_many_random_schemas_are_valid() -> None:
    assert finished_share(range(1000, 3000)) > 0.95
