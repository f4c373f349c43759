"""Rows cut from token ids: what a row may start with, and that an epoch is nearly the corpus."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.training.architecture import BOS_ID, EOS_ID, model_config
from tools.training.corpus import Document
from tools.training.dataset import (
    batches,
    cut_rows,
    epoch_rows,
    load_corpus,
    save_corpus,
    tokenise,
)
from tools.training.tokenizer import train_tokenizer

pytestmark = pytest.mark.nightly

ROW = 16


def _tokens(lengths: list[int]) -> torch.Tensor:
    """Documents whose tokens are all different: BOS, then numbers from 10."""
    parts, following = [], 10
    for length in lengths:
        parts.append(torch.tensor([BOS_ID, *range(following, following + length)]))
        following += length
    return torch.cat(parts)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=20, max_size=40), st.integers(0, 99))
def test_an_epoch_repeats_nothing_and_loses_little(lengths: list[int], seed: int) -> None:
    tokens = _tokens(lengths)
    rows = epoch_rows(tokens, ROW, torch.Generator().manual_seed(seed))
    assert rows.shape[1] == ROW
    counts = Counter(rows[rows != BOS_ID].tolist())
    assert max(counts.values()) == 1
    assert set(counts) <= set(tokens.tolist())
    # A packed row loses less than a row, and so does the last one.
    num_packed = sum(1 for row in rows if BOS_ID in row[1:].tolist()) + 1
    assert tokens.numel() - rows.numel() < (len(lengths) + num_packed) * ROW


def test_a_long_document_starts_its_row() -> None:
    rows = epoch_rows(_tokens([40, 40, 3, 3]), ROW, torch.Generator().manual_seed(0))
    starts = [row.tolist() for row in rows if int(row[0]) == BOS_ID]
    assert [0, *range(10, 25)] in starts
    assert [0, *range(50, 65)] in starts


def test_batches_go_on_for_ever_in_another_order() -> None:
    stream = batches(_tokens([100] * 8), ROW, num_rows=4, seed=1)
    taken = [next(stream) for _ in range(30)]
    assert all(batch.shape == (4, ROW) for batch in taken)
    assert not torch.equal(taken[0], taken[12])
    again = batches(_tokens([100] * 8), ROW, num_rows=4, seed=1)
    assert torch.equal(taken[0], next(again))


def test_cut_rows_keeps_the_order() -> None:
    assert cut_rows(torch.arange(10), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_corpus_survives_the_disk(tmp_path: Path) -> None:
    code = 'def add(a, b):\n    """Return the sum of a and b."""\n    c = a + b\n    return c\n'
    documents = [Document(name=f"m{i}.py", text=code * (i + 1)) for i in range(80)]
    assert {document.held_out for document in documents} == {True, False}
    tokenizer = train_tokenizer([code], 300)
    corpus = tokenise(documents, tokenizer)
    for part in (corpus.train, corpus.held_out):
        assert int(part[0]) == BOS_ID
        assert int(part[-1]) == EOS_ID
    num_bytes = int(corpus.token_bytes[corpus.held_out].sum())
    assert num_bytes == sum(len(document.text) for document in documents if document.held_out)
    save_corpus(corpus, tmp_path / "deep" / "tokens.safetensors")
    loaded = load_corpus(tmp_path / "deep" / "tokens.safetensors")
    assert torch.equal(loaded.train, corpus.train)
    assert torch.equal(loaded.held_out, corpus.held_out)
    assert torch.equal(loaded.token_bytes, corpus.token_bytes)
    assert loaded.metadata == corpus.metadata
    assert loaded.metadata["license"] == "PSF-2.0"


def test_a_document_that_spells_a_special_token_gets_its_bytes() -> None:
    code = "x = '<\uff5cend\u2581of\u2581sentence\uff5c>'\n"
    names = (f"m{i}.py" for i in range(99))
    name = next(name for name in names if not Document(name=name, text="").held_out)
    held = next(f"h{i}.py" for i in range(99) if Document(name=f"h{i}.py", text="").held_out)
    documents = [Document(name=name, text=code), Document(name=held, text=code)]
    corpus = tokenise(documents, train_tokenizer([code], 300))
    assert (corpus.train == EOS_ID).sum() == 1
    assert model_config()["eos_token_id"] == EOS_ID
