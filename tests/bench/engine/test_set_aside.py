"""What a measurement sets aside from the garbage collector is freed with it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from bench.engine import method, session
from deploy.cli import main
from engine.memory.kv_pool import KVPool

pytestmark = pytest.mark.nightly

COMMAND = ["bench", "decode", "--device", "cpu", "--model-shape", "tiny", "--layers", "2"]
SIZES = ["--context-lens", "40-70", "--output-len", "6", "--seconds", "0.1", "--warm-up", "0"]


def test_pools_of_measurements_in_one_process_are_set_aside_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[weakref.ref[KVPool]] = []
    num_found: list[int] = []
    build_kv_pool, measure_steps = session.build_kv_pool, method.measure_steps

    def build(*args: Any, **kwargs: Any) -> KVPool:
        pool = build_kv_pool(*args, **kwargs)
        pool.itself = pool  # type: ignore[attr-defined]  # only the collector can free it
        pools.append(weakref.ref(pool))
        return pool

    def measure(*args: Any, **kwargs: Any) -> Any:
        num_found.append(sum(each is pools[-1]() for each in gc.get_objects()))
        return measure_steps(*args, **kwargs)

    monkeypatch.setattr(session, "build_kv_pool", build)
    monkeypatch.setattr(method, "measure_steps", measure)
    for _ in range(2):
        assert main([*COMMAND, *SIZES, "--batch", "3", "--json", str(tmp_path / "out.json")]) == 0
    gc.collect()
    assert len(pools) == 2
    assert num_found == [0, 0], "the collector would look through them while steps run"
    assert [pool() for pool in pools] == [None, None]
