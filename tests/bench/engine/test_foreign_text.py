"""The benchmark on foreign text measures what it says, on files of its own."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench.engine import foreign_text
from bench.engine.foreign_text import chance_skew, measure, rows_of
from deploy.model_folder import BUNDLED_MODEL
from engine.boot.build import build_model
from engine.config import DeepseekV3Config

pytestmark = pytest.mark.nightly

SOURCE = "def add_{number}(a, b):\n    return a + b + {number}\n\n\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))


@pytest.fixture(autouse=True)
def _short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PROMPT_LENGTH", 20), ("NUM_OWN_TOKENS", 6)):
        monkeypatch.setattr(foreign_text, name, value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, count in (("small", 1), ("large", 60), ("middle", 30)):
        text = "".join(SOURCE.format(number=number) for number in range(count))
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_rows_are_beginnings_of_the_largest_files(folder: Path, tokenizer: Tokenizer) -> None:
    rows = list(rows_of(folder, 3, tokenizer, 48))
    assert [len(row) for row in rows] == [48, 48], "the small file does not fill a row"
    assert len(list(rows_of(folder, 1, tokenizer, 48))) == 1
    assert rows[0] == tokenizer.encode((folder / "large.py").read_text()).ids[:48]


def test_a_choice_by_chance_is_uneven_too() -> None:
    """256 choices among 16: the busiest expert has 1.4 times the mean without any preference."""
    assert 1.3 < chance_skew(DeepseekV3Config.from_dir(BUNDLED_MODEL), repeats=200) < 1.5


@pytest.mark.slow
def test_every_figure_is_a_share_or_a_loss(folder: Path, tokenizer: Tokenizer) -> None:
    model = build_model(BUNDLED_MODEL, with_mtp=True)
    rows = list(rows_of(folder, 1, tokenizer, 48))
    with torch.inference_mode():
        figures = measure(model, rows, tokenizer)
    assert figures["num_tokens"] == 47
    assert 0 < figures["loss"] < 5
    assert figures["bits_per_byte"] < figures["loss"]
    for name in ("mtp_acceptance_given", "mtp_acceptance_own", "fp8_same_best"):
        assert 0 < figures[name] <= 1
    assert len(figures["expert_skew"]) == model.config.num_moe_layers
    assert all(skew >= 1 for skew in figures["expert_skew"])
    assert 0 < figures["bfloat16_logprob_difference"] < figures["fp8_logprob_difference"] < 1
