"""What is installed: a wheel has every file that the code reads."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "tool"
]["setuptools"]
LEFT_OUT = ("bench/results/", "bench/rows/", "deploy/docker/", "engine/README.md")
"""For who has the sources: records, tables to measure, how images are made."""


def test_every_file_of_a_package_is_installed() -> None:
    missing = []
    for pattern in SETUPTOOLS["packages"]["find"]["include"]:
        package = ROOT / pattern.removesuffix("*")
        data = SETUPTOOLS["package-data"].get(package.name, [])
        installed = {path for glob in ["**/*.py", *data] for path in package.glob(glob)}
        files = {path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
        missing += [str(path.relative_to(ROOT)) for path in files - installed]
    assert [path for path in sorted(missing) if not path.startswith(LEFT_OUT)] == []
