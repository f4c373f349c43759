"""No module imports itself by way of others, not even for its types."""

from __future__ import annotations

import graphlib
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]


def test_no_module_imports_itself_by_way_of_others() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = settings["tool"]["importlinter"]["root_packages"]
    graph = grimp.build_graph(*packages, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > len(packages)
    graphlib.TopologicalSorter(imports).prepare()
