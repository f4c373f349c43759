"""Triton compiles for a GPU that is not here: for tests of what kernels become.

Needs Triton and no GPU, and not its interpreter, which compiles nothing.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Elsewhere:
    """A driver that only says what it would run on."""

    def __init__(self, sm: int) -> None:
        compiler = importlib.import_module("triton.backends.compiler")
        self._target = compiler.GPUTarget("cuda", sm, 32)

    def get_current_device(self) -> int:
        # Kernels that are compiled are kept by device: one number for each kind.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextmanager
def compiling_only(monkeypatch: pytest.MonkeyPatch, sm: int) -> Iterator[list[tuple[str, Any]]]:
    """Compile for `sm` instead of launching; gives what was compiled, by the function's name."""
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    launcher = importlib.import_module("engine.kernels.fused.launch").Launcher
    driver = importlib.import_module("triton.runtime.driver").driver
    run, found = jit.run, list[tuple[str, Any]]()

    def compile_only(self: Any, *arguments: Any, **options: Any) -> Any:
        kernel = run(self, *arguments, **{**options, "warmup": True})
        found.append((self.fn.__name__, kernel))
        return kernel

    monkeypatch.setattr(jit, "run", compile_only)
    monkeypatch.setattr(launcher, "_remember", lambda *_: None)
    driver.set_active(Elsewhere(sm))
    yield found
    if torch.cuda.is_available():
        driver.reset_active()
