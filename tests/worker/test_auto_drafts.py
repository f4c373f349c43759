"""Drafts that are left to the cluster: the same answer in every process that has the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config_file import SECRET_VARIABLE
from runtime.worker import parse_worker_options
from tests.deploy.fakes import write_model
from tests.runtime.test_worker import arguments
from worker.auto_drafts import decided


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "s")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("num_layers", "asked", "expected"),
    [(0, '"auto"', 0), (1, '"auto"', "auto"), (0, "2", 2), (1, "2", 2), (1, "0", 0)],
)
def test_auto_is_none_without_the_layer_and_a_number_is_left_to_be_refused(
    tmp_path: Path, role: str, num_layers: int, asked: str, expected: int | str
) -> None:
    path = write_model(tmp_path, num_nextn_predict_layers=num_layers)
    text = f'[model]\npath = "{path}"\n[decode]\nnum_speculative_tokens = {asked}\n'
    options = parse_worker_options(role, arguments(tmp_path, text, rank="0"))
    assert decided(options).config.decode.num_speculative_tokens == expected
