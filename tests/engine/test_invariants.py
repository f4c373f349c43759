"""What keeps memory whole is checked also where Python runs without its assertions."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.formats.deep_gemm import DeepGemm
from engine.invariants import require
from engine.kernels.masked_rows import MaskedRows, empty_masked
from runtime.errors import InternalError

ENGINE = Path(__file__).parents[2] / "engine"
LAUNCHERS = (
    "attention/flash_attention.py",
    "attention/flash_mla.py",
    "attention/latent_storage.py",
    "attention/paged_mla",
    "attention/torch_attention.py",
    "formats",
    "kernels",
    "parallel/nvlink",
    "parallel/deep_ep_buffers.py",
    "parallel/deep_ep_low_latency_dispatcher.py",
    "parallel/masked_gathered_dispatcher.py",
)
"""What hands sizes and addresses to a device."""


def asserts_in(file: Path) -> list[str]:
    """Return the assertions of a file, but those that run inside a kernel or tell a type."""
    found = []

    def visit(node: ast.AST) -> None:
        decorators = getattr(node, "decorator_list", [])
        if any("jit" in ast.unparse(decorator) for decorator in decorators):
            return
        if isinstance(node, ast.Assert):
            test = ast.unparse(node.test)
            if not test.startswith("isinstance(") and not test.endswith(" is not None"):
                found.append(f"{file.relative_to(ENGINE)}:{node.lineno}: {test}")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return found


def test_launches_are_guarded_by_errors_and_not_by_assertions() -> None:
    files = [
        file
        for name in LAUNCHERS
        for file in ([ENGINE / name] if name.endswith(".py") else (ENGINE / name).rglob("*.py"))
    ]
    assert len(files) > 40
    assert [found for file in files for found in asserts_in(file)] == []


def test_what_was_given_and_what_is_wanted_are_said() -> None:
    require(True, "rows", 5, "anything goes")
    with pytest.raises(InternalError, match=r"^rows: 5 was given; at most 4 are wanted$"):
        require(False, "rows", 5, "at most 4 are wanted")


@pytest.mark.parametrize("max_rows", [64, 132])
def test_a_masked_product_writes_no_rows_of_the_next_expert(
    monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """The library stores whole tiles."""
    calls: list[object] = []
    library = SimpleNamespace(
        fp8_m_grouped_gemm_nt_masked=lambda *args: calls.append(args), get_pdl=lambda: False
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", library)  # type: ignore[arg-type]

    def rows(number: int) -> MaskedRows:
        data, scale = empty_masked(2, number, 128, torch.device("cpu"))
        counts = torch.zeros(2, dtype=torch.int32)
        return MaskedRows(data_LMD=data, scale_LMG=scale, num_rows_L=counts, expected_rows=1)

    weight = torch.zeros(2, 256, 128), torch.ones(2, 2, 1)
    assert DeepGemm().masked_linear(rows(128), *weight).shape == (2, 128, 256)
    with pytest.raises(InternalError, match=f"{max_rows} was given; a multiple of 128"):
        DeepGemm().masked_linear(rows(max_rows), *weight)
    assert len(calls) == 1
