"""What a driver tells is read; what it does not tell is said."""

from pathlib import Path

import pytest

from bench.engine.clocks import FIELDS, parse_clocks, read_clocks

LINES = """\
GPU-AA11, 1980, 1980, 3201, 412.5, 700.00, 51
GPU-bb22, 1575, 1980, 3201, [N/A], 700.00, 66
"""


def install(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_are_told_in_the_order_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").write_text(LINES, encoding="utf-8")
    install(tmp_path, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/answer', monkeypatch)
    found = read_clocks(["bb22", "aa11"])
    assert found["why"] is None
    assert found["gpus"] == [
        {
            "sm_mhz": 1575.0, "max_sm_mhz": 1980.0, "memory_mhz": 3201.0, "power_w": None,
            "power_limit_w": 700.0, "temperature_c": 66.0,
        },
        {
            "sm_mhz": 1980.0, "max_sm_mhz": 1980.0, "memory_mhz": 3201.0, "power_w": 412.5,
            "power_limit_w": 700.0, "temperature_c": 51.0,
        },
    ]  # fmt: skip
    asked = (tmp_path / "asked").read_text(encoding="utf-8")
    assert f"--query-gpu=uuid,{','.join(FIELDS.values())}" in asked


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'no driver' >&2; exit 9", "nvidia-smi ended with 9: no driver"),
        ("echo 'GPU-cc33, 1, 2, 3, 4, 5, 6'", "does not list aa11"),
        ("true", "does not list aa11"),
    ],
)
def test_a_driver_that_does_not_answer_is_no_figure(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, script, monkeypatch)
    found = read_clocks(["aa11"])
    assert found["gpus"] is None
    assert why in str(found["why"])


def test_where_there_is_no_tool_or_no_gpu_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_clocks(["aa11"]) == {"gpus": None, "why": "nvidia-smi is not installed"}
    assert "CPU" in str(read_clocks([])["why"])


def test_lines_that_are_no_gpus_are_left_out() -> None:
    assert set(parse_clocks("\nwarning: something\n" + LINES)) == {"aa11", "bb22"}
