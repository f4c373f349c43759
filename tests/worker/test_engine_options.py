"""A section says the same to an engine as in its file, in the engine's terms."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.options import (
    ChunkSteps,
    DispatcherKind,
    EngineOptions,
    KVOptions,
    ModelOptions,
    Switch,
    TokenSteps,
)
from engine.parallel.dims import ParallelDims
from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from worker.engine_options import engine_options, model_options, parallel_dims

NONE = DecodeSection(num_speculative_tokens=0)
"""What a section is once drafts have been decided on (`worker.auto_drafts`)."""
COUNTS = st.integers(2, 10**6)
SWITCHES = st.sampled_from(["auto", "on", "off"])
BOTH: dict[str, st.SearchStrategy[Any]] = {
    "num_threads": COUNTS,
    "max_num_seqs": COUNTS,
    "num_blocks": COUNTS,
    "block_size": COUNTS,
    "gpu_memory_fraction": st.floats(0.01, 1.0),
    "device": st.sampled_from(["cpu", "cuda"]),
    "num_redundant_experts": COUNTS,
    "rebalance_experts": st.sampled_from(["on", "off"]),
}
PREFILLS = st.builds(
    PrefillSection,
    tp=st.just(2),
    max_num_batched_tokens=st.integers(16, 10**6),
    two_batch_overlap=SWITCHES,
    cuda_graphs=SWITCHES,
    max_masked_tokens=st.one_of(st.just("auto"), COUNTS),
    overlap_shared_expert=st.booleans(),
    dependent_launches=SWITCHES,
    **BOTH,
)
DECODES = st.builds(
    DecodeSection,
    cuda_graphs=SWITCHES,
    overlap_shared_expert=st.booleans(),
    dependent_launches=SWITCHES,
    dispatcher=st.sampled_from(["auto", "nvlink", "deep-ep", "gathered"]),
    max_tokens_per_rank=COUNTS,
    num_speculative_tokens=st.integers(0, 3),
    **BOTH,
)
ELSEWHERE = {"steps", "kv", "prefix", "dtype", "scatter_tokens"}
"""Fields that are no field of a section, or say it in other terms."""


def fields_of(part: EngineOptions | KVOptions | ChunkSteps | TokenSteps) -> dict[str, object]:
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: value for name, value in values.items() if name not in ELSEWHERE}


@given(st.one_of(PREFILLS, DECODES))
def test_every_field_has_the_section_s_value_by_the_section_s_name(
    section: PrefillSection | DecodeSection,
) -> None:
    options = engine_options(section)
    said = fields_of(options) | fields_of(options.kv) | fields_of(options.steps)
    assert said == {name: getattr(section, name) for name in said}
    assert options.named("num_blocks").startswith(options.prefix)
    assert options.token_bound[1] == getattr(section, options.token_bound[0])


def test_refusals_name_the_section() -> None:
    assert engine_options(PrefillSection()).named("num_blocks") == "prefill.num_blocks"
    assert engine_options(NONE).named("num_blocks") == "decode.num_blocks"


def test_a_role_has_steps_of_its_own() -> None:
    prefill = PrefillSection(tp=2, two_batch_overlap="on", max_num_batched_tokens=96)
    assert engine_options(prefill).steps == ChunkSteps(
        max_num_batched_tokens=96, two_batch_overlap=Switch.ON, scatter_tokens=True
    )
    assert not engine_options(PrefillSection(tp=2, scatter_tokens="off")).steps.scatter_tokens
    assert not engine_options(PrefillSection()).steps.scatter_tokens
    decode = replace(NONE, cuda_graphs="off", dispatcher="deep-ep")
    assert engine_options(decode).steps == TokenSteps(
        cuda_graphs=Switch.OFF, dispatcher=DispatcherKind.DEEP_EP
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", None),
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("fp8", torch.float8_e4m3fn),
    ],
)
def test_kv_is_kept_in_the_type_of_the_section(name: str, dtype: torch.dtype | None) -> None:
    assert engine_options(PrefillSection(kv_dtype=name)).kv.dtype is dtype
    assert engine_options(replace(NONE, kv_dtype=name)).kv.dtype is dtype


def test_as_many_blocks_as_fit_stay_so() -> None:
    assert engine_options(replace(NONE, device="cuda", num_blocks=0)).kv.num_blocks == 0


def test_the_model_of_a_cluster() -> None:
    model = ModelSection(path="/models/x", load_format="dummy", max_model_len=99)
    assert model_options(ClusterConfig(model=model, decode=NONE)) == ModelOptions(
        path="/models/x", load_format="dummy", dtype=torch.float32, max_model_len=99
    )
    on_gpu = ClusterConfig(model=model, decode=replace(NONE, device="cuda"))
    assert model_options(on_gpu).dtype is torch.bfloat16


def test_axes_of_a_role() -> None:
    assert parallel_dims(PrefillSection(tp=2), 1) == ParallelDims(tp=2, ep=2, rank=1)
    plain = PrefillSection(tp=2, expert_parallel=False)
    assert parallel_dims(plain) == ParallelDims(tp=2)
    for section in (PrefillSection(dp=4), DecodeSection(dp=4)):
        assert parallel_dims(section, 3) == ParallelDims(dp=4, ep=4, rank=3)


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_drafts_need_the_layers_of_both_roles_and_a_row_each(num_drafts: int) -> None:
    decode = DecodeSection(num_speculative_tokens=num_drafts, max_num_seqs=5)
    config = ClusterConfig(decode=decode)
    assert model_options(config).with_mtp is (num_drafts > 0)
    assert engine_options(decode).max_rows == 5 * (1 + num_drafts)


@pytest.mark.parametrize(("max_tokens_per_rank", "rows"), [(128, 128), (384, 384), (8192, 1024)])
def test_chosen_drafts_have_the_rows_that_there_is_room_for(
    max_tokens_per_rank: int, rows: int
) -> None:
    decode = DecodeSection(
        num_speculative_tokens="auto", max_num_seqs=256, max_tokens_per_rank=max_tokens_per_rank
    )
    assert model_options(ClusterConfig(decode=decode)).with_mtp
    options = engine_options(decode)
    assert options.draft_choices.numbers == (0, 1, 2, 3)
    assert options.max_rows == max(rows, 256)
    few = options.draft_choices.of(max_tokens_per_rank // 4)
    assert few == (0, 1, 2, 3)
