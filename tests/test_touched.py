"""Which checks a change asks for beside the gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import touched

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("name", "path", "is_asked_for"),
    [
        ("kernels", "engine/attention/paged_mla/kernel.py", True),
        ("kernels", "tests/engine/ops/test_norm.py", True),
        ("kernels", "pyproject.toml", True),
        ("kernels", "router/http/app.py", False),
        ("kernels", "docs/use/api.md", False),
        ("clients", "router/text/stops.py", True),
        ("clients", "engine/model/llama.py", False),
        ("pods", "helm/tandem/values.yaml", True),
    ],
)
def test_paths_ask_for_their_check(name: str, path: str, is_asked_for: bool) -> None:
    assert touched.asks_for(name, ["README.md", path]) is is_asked_for


def test_every_path_is_there() -> None:
    for paths in touched.PATHS.values():
        assert [path for path in paths if not (ROOT / path).exists()] == []


def test_what_is_not_known_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_BASE", raising=False)
    assert touched.base_commit("kernels", tmp_path / "none.toml") == ""
    assert touched.changed_files("0" * 40) is None
    assert touched.asks_for("kernels", None)


def test_the_base_is_the_commit_that_the_check_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_BASE", raising=False)
    record = tmp_path / "nightly.toml"
    record.write_text('[kernels]\ncommit = "abc"\n')
    assert touched.base_commit("kernels", record) == "abc"
    assert touched.base_commit("clients", record) == ""
    monkeypatch.setenv("TANDEM_BASE", "main~1")
    assert touched.base_commit("clients", record) == "main~1"
