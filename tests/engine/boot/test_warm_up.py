"""Warm-up: which products it runs, in which order over ranks, and where caches go."""

import os
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.engine.loopback_masked_dispatcher import LoopbackMaskedDispatcher
from engine.boot.jit_cache import VARIABLE, use_jit_cache
from engine.boot.warm_up import (
    ROWS_VARIABLE,
    Product,
    attention_products,
    chosen_rows,
    divide,
    products,
    row_counts,
    warm_up,
)
from engine.config import DeepseekV3Config
from engine.execution import Execution
from engine.kernels.alignment import max_aligned_rows, row_steps
from engine.kernels.portable import portable_kernels
from engine.layers.matrix import Matrix
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.weights.dummy import fill_with_dummy_weights
from tests.engine.test_fp8_path import CONFIG

LIBRARY_VARIABLES = (
    "DG_JIT_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
)


def make_model(*, fp8: bool, execution: Execution | None = None) -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config.from_hf(CONFIG)
    kernels = portable_kernels(has_fp8=fp8)
    model = DeepseekV3ForCausalLM(
        config, dtype=torch.bfloat16, kernels=kernels, execution=execution
    )
    fill_with_dummy_weights(model)
    return model


@given(st.integers(1, 100_000))
def test_row_counts_ascend_to_the_maximum(max_tokens: int) -> None:
    counts = row_counts(max_tokens)
    assert counts == sorted(set(counts))
    assert counts[0] >= 1
    assert counts[-1] == max_tokens


TILES = (64, 128, 256)


def tiles_in_last_wave(rows: int, columns: int) -> list[int]:
    """What a library's choice of a tile depends on: how many tiles its last wave has."""
    return [-(-rows // tile) * columns % 132 for tile in TILES]


@given(rows=st.integers(1, 2047), columns=st.integers(1, 300))
def test_rows_that_fill_waves_alike_are_among_those_that_are_run(rows: int, columns: int) -> None:
    alike = [tiles_in_last_wave(count, columns) for count in row_counts(8192)]
    assert tiles_in_last_wave(rows, columns) in alike


def test_whoever_knows_the_rows_names_them() -> None:
    assert chosen_rows({ROWS_VARIABLE: "64, 8,4096"}, 1024) == [8, 64]
    for environment in ({}, {ROWS_VARIABLE: ""}, {ROWS_VARIABLE: "4096"}):
        assert chosen_rows(environment, 1024) == row_counts(1024)


def test_every_weight_shape_is_run_once() -> None:
    model = make_model(fp8=True)
    found = products(model, 32)
    names = [product.name for product in found]
    assert len(names) == len(set(names))
    experts = model.config.n_routed_experts
    most = max_aligned_rows(32 * model.config.num_experts_per_tok, experts)
    rows = [int(name.split(" x ")[1]) for name in names if name.startswith("experts")]
    assert rows == row_steps(most)
    shapes = {name.split(" x ")[0] for name in names if name.startswith("linear")}
    matrices = [m for m in model.modules() if isinstance(m, Matrix) and m.weight.dim() == 2]
    assert shapes == {f"linear {tuple(m.weight.shape)}" for m in matrices if m.takes_quantized}
    for product in found:
        out = product.run()
        assert isinstance(out, torch.Tensor)
        assert bool(torch.isfinite(out.float()).all()), product.name


def test_masked_products_are_run_for_every_size_that_comes() -> None:
    kernels = portable_kernels(has_fp8=True)
    experts = DeepseekV3Config.from_hf(CONFIG).n_routed_experts
    loopback = LoopbackMaskedDispatcher(kernels, experts, num_ranks=8)
    model = make_model(fp8=True, execution=Execution(dispatcher=loopback))
    found = products(model, 64, rows=(1, 16, 64))
    masked = [product for product in found if product.name.startswith("experts")]
    sizes = [product.name.split(" x ")[1] for product in masked]
    assert sizes == ["1 of 128", "16 of 128", "64 of 512"]
    assert len({product.name.split(" x ")[0] for product in masked}) == 1
    for product in masked:
        out = product.run()
        assert isinstance(out, torch.Tensor)
        assert out.shape[:2] == (experts, int(product.name.split()[-1]))


def test_attention_is_run_as_the_layers_run_it() -> None:
    model = make_model(fp8=True)
    found = attention_products(model)
    assert [product.name for product in found] == [
        "attention whole",
        "attention own part",
        "attention earlier part",
    ]
    for product in found:
        out = product.run()
        assert isinstance(out, torch.Tensor)
        assert out.shape[1:] == (model.config.num_attention_heads, model.config.v_head_dim)
    assert attention_products(torch.nn.Linear(2, 2)) == []


def test_nothing_to_do_without_fp8() -> None:
    model = make_model(fp8=False)
    assert products(model, 32) == []


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadGroup(RankGroup):
    """Ranks as threads of one process."""

    meeting: threading.Barrier

    def barrier(self) -> None:
        self.meeting.wait(60)


@dataclass(frozen=True, slots=True)
class Run:
    rank: int
    name: str


def test_a_shape_is_compiled_by_one_rank_then_read_by_all() -> None:
    meeting = threading.Barrier(3)
    order: list[Run] = []
    names = [f"{shape} x {rows}" for shape in "abcd" for rows in (1, 16)]
    moved: list[tuple[int, int]] = []

    def run_rank(rank: int) -> None:
        dims = ParallelDims(tp=3, rank=rank)
        group = ThreadGroup(rank=rank, size=3, meeting=meeting)
        groups = ProcessGroups(dims=dims, boot_group=group)
        todo = [Product(name=n, run=partial(order.append, Run(rank, n))) for n in names]
        note = (lambda done, total: moved.append((done, total))) if rank == 0 else None
        warm_up(todo, groups, progress=note)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    first, then = order[: len(names)], order[len(names) :]
    assert sorted(run.name for run in first) == names, "each is compiled once"
    owners = {(run.name[0], run.rank) for run in first}
    assert len(owners) == 4, "all products of a shape are with one rank"
    assert {rank for _, rank in owners} == {0, 1, 2}
    assert {(run.rank, run.name) for run in then} == {(r, n) for r in range(3) for n in names}
    assert moved == [(n, 4) for n in range(1, 5)]


def test_a_rank_alone_runs_each_product_once() -> None:
    order: list[str] = []
    names = [f"a x {rows}" for rows in range(3)]
    warm_up([Product(name=n, run=partial(order.append, n)) for n in names], ProcessGroups())
    assert order == names


@given(st.lists(st.integers(1, 9)), st.integers(1, 8))
def test_shares_are_whole_shapes_and_all_of_them(counts: list[int], num_ranks: int) -> None:
    todo = [
        Product(name=f"{shape} x {rows}", run=int)
        for shape, count in enumerate(counts)
        for rows in range(count)
    ]
    shares = divide(todo, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(p.name for share in shares for p in share) == sorted(p.name for p in todo)
    shapes = [{product.shape for product in share} for share in shares]
    assert sum(map(len, shapes)) == len(counts), "no shape is with two ranks"


def test_caches_lie_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "jit"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    folder = use_jit_cache()
    assert folder == tmp_path / "jit"
    assert folder.is_dir()
    assert os.environ["DG_JIT_CACHE_DIR"].startswith(str(folder))
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere", "a user's own choice stands"
    for name in LIBRARY_VARIABLES:
        monkeypatch.delenv(name)
