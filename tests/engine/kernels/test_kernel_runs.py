"""Every kernel of ours was run by a test in Triton's interpreter.

The last step of `make kernels-check`, behind the steps that run them; the walk itself is tested
anywhere.
"""

import os
from pathlib import Path

import pytest

from tests.engine.kernel_runs import (
    INSTRUCTIONS,
    NOT_INTERPRETED,
    VARIABLE,
    find_kernels,
    find_makers,
    noted_runs,
    uses,
)
from tests.engine.triton_device import IS_INTERPRETED

FOREIGN = ("inline_asm_elementwise", "gdc_wait", "gdc_launch_dependents", "extern_elementwise")
"""Instructions that the interpreter refuses."""


@pytest.mark.gpu
@pytest.mark.skipif(
    IS_INTERPRETED or VARIABLE not in os.environ, reason="make kernels-check runs it, at its end"
)
def test_every_kernel_is_run_in_the_interpreter() -> None:
    ran = noted_runs(Path(os.environ[VARIABLE]))
    assert sorted(set(find_kernels()) - ran - set(NOT_INTERPRETED)) == [], "no test runs these"
    assert sorted(ran & set(NOT_INTERPRETED)) == [], "these do run"


def test_what_is_not_interpreted_is_named() -> None:
    kernels = find_kernels()
    assert set(NOT_INTERPRETED) <= set(kernels)
    foreign = {name for name, kernel in kernels.items() if uses(kernel, *FOREIGN)}
    assert foreign == set(INSTRUCTIONS) | {
        name for name in NOT_INTERPRETED if uses(kernels[name], *FOREIGN)
    }


def test_kernels_are_made_by_decorators_alone() -> None:
    assert find_makers() == ["engine.kernels.fused.launch"], "the decorator itself"


def test_the_walk_finds_kernels_of_every_kind(tmp_path: Path) -> None:
    package = tmp_path / "engine"
    package.mkdir()
    (package / "a.py").write_text(
        "import torch, triton\n"
        "from triton.experimental import gluon\n"
        "@triton.jit\ndef _one(): pass\n"
        "@triton.autotune()\n@triton.jit(do_not_specialize=['n'])\ndef _two(n): tl.gdc_wait()\n"
        "@launched('n')\ndef _three(n): pass\n"
        "@gluon.jit\ndef _four(): pass\n"
        "@torch.jit.script\ndef not_ours(): pass\n"
        "def plain(): pass\n",
        encoding="utf-8",
    )
    (package / "b.py").write_text("made = triton.jit(print)\n", encoding="utf-8")
    kernels = find_kernels(package)
    assert sorted(kernels) == [f"engine.a:{name}" for name in ("_four", "_one", "_three", "_two")]
    assert uses(kernels["engine.a:_two"], *FOREIGN)
    assert not uses(kernels["engine.a:_one"], *FOREIGN)
    assert find_makers(package) == ["engine.b"]


def test_there_are_kernels() -> None:
    found = find_kernels()
    assert len(found) > 40
    for name in (
        "engine.kernels.fused.quant:_quantize_tile",
        "engine.parallel.nvlink.rows:_send_rows",
    ):
        assert name in found


def test_notes_of_all_processes_count(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("a:b\nc:d\n", encoding="utf-8")
    (tmp_path / "2.txt").write_text("c:d\ne:f\n", encoding="utf-8")
    assert noted_runs(tmp_path) == {"a:b", "c:d", "e:f"}
