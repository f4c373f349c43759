"""Llama gives transformers' logits and tokens: in chunks, behind cached prefixes, step by step."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.parity import LOGIT_TOLERANCE, compare_with_transformers
from engine.batch import ForwardBatch, pack_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.boot.rank import BootedRank, boot_rank
from engine.execution import Execution
from engine.generate import generate
from engine.graphs.graph_runner import capture_steps
from engine.layers.linear import ColumnParallelLinear
from engine.memory.kv_pool import KVPool
from engine.micro_batches import OverlapRule
from engine.model.llama import LlamaForCausalLM
from engine.model.registry import read_config, spec_of
from engine.model.spec import ServedModel, check_dims
from engine.options import ChunkSteps, EngineOptions, KVOptions, ModelOptions, TokenSteps
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.errors import ConfigError
from runtime.sampling import SamplingParams
from tests.engine.relative_error import relative_error
from tests.engine.tiny_llama import LLAMA3, llama_config, random_llama, write_llama

BLOCK_SIZE, NUM_TOKENS = 8, 60
TOKENS = np.random.default_rng(0).integers(0, 128, NUM_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config(rope_scaling=dict(LLAMA3))
    return write_llama(tmp_path_factory.mktemp("llama"), config)


def run(model: ServedModel, pool: KVPool, *parts: tuple[int, int, int]) -> list[Tensor]:
    """Run parts (first block, start, end) of `TOKENS` in one step; logits of each."""
    lengths = np.array([end - start for _, start, end in parts])
    tables = [np.arange(first, first + 8, dtype=np.int32) for first, _, _ in parts]
    batch = pack_forward_batch(
        np.concatenate([TOKENS[start:end] for _, start, end in parts]),
        lengths,
        np.array([end for _, _, end in parts]),
        np.stack(tables),
        logits_indices=np.arange(lengths.sum()),
        block_size=BLOCK_SIZE,
    )
    with torch.inference_mode():
        logits = model.compute_logits(model.forward(batch, pool))
    return list(logits.split(lengths.tolist()))


def pool_of(model: ServedModel) -> KVPool:
    pool = build_kv_pool(model, 17, block_size=BLOCK_SIZE)
    pool.data.fill_(float("nan"))  # nothing may be read that was not written
    return pool


def their_logits(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    from transformers import LlamaForCausalLM as TheirLlama

    theirs: Any = TheirLlama.from_pretrained(checkpoint, dtype=dtype).eval()
    with torch.inference_mode():
        logits: Tensor = theirs(torch.tensor(TOKENS)[None]).logits[0].float()
    return logits


@pytest.mark.parametrize("seed", range(6))
def test_random_configurations(tmp_path: Path, seed: int) -> None:
    write_llama(tmp_path, random_llama(seed), seed=seed)
    report = compare_with_transformers(tmp_path, num_prompts=2, num_steps=16, seed=seed)
    assert report.passed, report.format()


def test_the_random_configurations_differ_where_it_matters() -> None:
    configs = [random_llama(seed) for seed in range(6)]
    assert {config["rope_scaling"] is None for config in configs} == {True, False}
    assert {config["tie_word_embeddings"] for config in configs} == {True, False}
    assert {config["head_dim"] is None for config in configs} == {True, False}
    shared = {c["num_attention_heads"] // (c["num_key_value_heads"] or 1) for c in configs}
    assert len(shared) > 1
    assert None in {config["num_key_value_heads"] for config in configs}


def test_a_wrong_rotation_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: our side turns as if the frequencies were not scaled."""
    write_llama(tmp_path, llama_config(rope_scaling=dict(LLAMA3)))
    plain = torch.tensor([1.0, 0.1, 0.01, 0.001])
    monkeypatch.setattr("engine.model.llama.inverse_frequencies", lambda config: plain)
    report = compare_with_transformers(tmp_path, num_prompts=1, num_steps=4)
    assert report.max_relative_error > LOGIT_TOLERANCE


@given(cuts=st.lists(st.integers(1, NUM_TOKENS - 1), max_size=4, unique=True).map(sorted))
@settings(max_examples=12)
def test_chunks_give_the_logits_of_the_whole_prompt(checkpoint: Path, cuts: list[int]) -> None:
    model = build_model(checkpoint)
    pool = pool_of(model)
    edges = [0, *cuts, NUM_TOKENS]
    parts = [run(model, pool, (1, a, b))[0] for a, b in itertools.pairwise(edges)]
    torch.testing.assert_close(torch.cat(parts), their_logits(checkpoint), rtol=1e-4, atol=1e-4)


def test_steps_of_a_prompt_s_chunk_a_cached_prefix_and_a_single_token(checkpoint: Path) -> None:
    """Sequences of one step do not see each other, whatever each has behind it."""
    model, expected = build_model(checkpoint), their_logits(checkpoint)
    pool = pool_of(model)
    run(model, pool, (1, 0, 31), (9, 0, 59))
    first, second = run(model, pool, (1, 31, 47), (9, 59, 60))
    torch.testing.assert_close(first, expected[31:47], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, expected[59:], rtol=1e-4, atol=1e-4)
    (alone,) = run(model, pool, (9, 16, 60))
    torch.testing.assert_close(alone, expected[16:], rtol=1e-4, atol=1e-4)


def test_in_bfloat16_no_more_is_lost_than_transformers_loses(checkpoint: Path) -> None:
    model = build_model(checkpoint, dtype=torch.bfloat16)
    (ours,) = run(model, pool_of(model), (1, 0, NUM_TOKENS))
    exact = their_logits(checkpoint)
    lost = relative_error(their_logits(checkpoint, torch.bfloat16), exact)
    assert 0 < relative_error(ours, exact) < 1.5 * lost + 5e-3


def test_steps_of_fixed_shape_give_the_tokens_of_plain_ones(checkpoint: Path) -> None:
    model, params = build_model(checkpoint), SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [TOKENS[:n].tolist() for n in (5, 33)]
    expected = [output.token_ids for output in generate(model, prompts, params)]
    pool = build_kv_pool(model, 17, block_size=BLOCK_SIZE)
    plain = ModelRunner(model, pool, Sampler(model.config.vocab_size))
    runner = capture_steps(plain, max_num_seqs=4, max_model_len=64)
    requests = [
        Request(request_id=str(i), prompt_token_ids=prompt, sampling=params)
        for i, prompt in enumerate(prompts)
    ]
    for i, request in enumerate(requests):
        request.block_table = list(range(1 + 8 * i, 9 + 8 * i))
    for _ in range(12):
        steps = [ScheduledRequest(r, r.num_tokens - r.num_computed_tokens) for r in requests]
        for result in runner.launch(steps).collect():
            assert result.sampled is not None
            result.request.num_computed_tokens = result.request.num_tokens
            result.request.output_token_ids.append(result.sampled.token_id)
    assert [request.output_token_ids for request in requests] == expected


def test_layers_are_told_in_order_and_a_rank_without_requests_runs_too(checkpoint: Path) -> None:
    model, done = build_model(checkpoint), list[int]()
    with torch.inference_mode():
        model.forward(ForwardBatch.dummy(), pool_of(model), on_layer_done=done.append)
    assert done == [0, 1, 2]


def test_what_it_says_of_itself(checkpoint: Path) -> None:
    model = build_model(checkpoint)
    assert isinstance(model, LlamaForCausalLM)
    assert model.config.kv_spec.width == 2 * 4 * 8
    assert pool_of(model).data.shape == (17, 3, 4, BLOCK_SIZE, 16)
    assert not model.waits_for_counts


@pytest.mark.parametrize(
    ("kv_dtype", "most"), [(torch.bfloat16, 0.02), (torch.float8_e4m3fn, 0.15)], ids=str
)
def test_a_pool_of_fewer_bits_costs_its_rounding(
    checkpoint: Path, kv_dtype: torch.dtype, most: float
) -> None:
    model = build_model(checkpoint)
    pool = build_kv_pool(model, 17, block_size=BLOCK_SIZE, dtype=kv_dtype)
    logits = torch.cat([run(model, pool, (1, a, b))[0] for a, b in ((0, 30), (30, 59), (59, 60))])
    assert 0 < relative_error(logits, their_logits(checkpoint)) < most


def test_preempted_blocks_come_back_elsewhere(checkpoint: Path) -> None:
    model, expected = build_model(checkpoint), their_logits(checkpoint)
    pool = pool_of(model)
    run(model, pool, (1, 0, 40))
    saved = pool.copy_out(range(1, 6))
    pool.data.fill_(float("nan"))
    pool.copy_in(range(9, 14), saved)
    (rest,) = run(model, pool, (9, 40, 60))
    torch.testing.assert_close(rest, expected[40:], rtol=1e-4, atol=1e-4)


def test_invented_weights_are_those_of_any_number_of_ranks(checkpoint: Path) -> None:
    """What a rank of two holds is its part of what one holds."""
    whole = build_model(checkpoint, load_format="dummy")
    for rank in range(2):
        group = RankGroup(rank=rank, size=2)
        groups = ProcessGroups(dims=ParallelDims(tp=2, rank=rank), tp_group=group)
        part = build_model(checkpoint, groups, load_format="dummy")
        assert part.kv_spec == whole.kv_spec.on_rank(2)
        theirs = dict(part.named_modules())
        for name, module in whole.named_modules():
            if name.endswith("qkv_proj"):
                assert isinstance(module, ColumnParallelLinear)
                shares = module.weight.split([64, 32, 32])
                mine = torch.cat([share.chunk(2)[rank] for share in shares])
                assert torch.equal(theirs[name].weight, mine)


def test_steps_in_halves_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM runs every step whole") as caught:
        build_model(checkpoint, execution=Execution(overlap=OverlapRule()))
    assert caught.value.path == "two_batch_overlap"


STEPS = {"prefill": ChunkSteps(), "decode": TokenSteps()}


@pytest.mark.parametrize("role", STEPS)
def test_a_rank_boots(role: str, checkpoint: Path) -> None:
    booted = boot(role, checkpoint)
    assert booted.kv_pool.kv_spec.num_heads == 4
    assert not booted.launch_waits


@pytest.mark.parametrize("role", STEPS)
def test_a_rank_on_a_gpu_refuses_at_boot(role: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no attention for GPUs") as caught:
        boot(role, checkpoint, device="cuda")
    assert (caught.value.path, caught.value.value) == (f"{role}.device", "cuda")


def boot(role: str, checkpoint: Path, *, device: str = "cpu") -> BootedRank:
    options = EngineOptions(
        steps=STEPS[role], kv=KVOptions(num_blocks=8), device=device, prefix=f"{role}."
    )
    return boot_rank(ModelOptions(path=checkpoint, max_model_len=64), options, ParallelDims())


def test_gpus_are_refused_with_what_is_missing(checkpoint: Path) -> None:
    spec = spec_of(read_config(checkpoint))
    spec.check_device("prefill.device", "cpu")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no attention for GPUs") as caught:
        spec.check_device("prefill.device", "cuda")
    assert (caught.value.path, caught.value.value) == ("prefill.device", "cuda")


def test_more_ranks_than_key_value_heads_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads = 4") as caught:
        check_dims(ParallelDims(tp=8), read_config(checkpoint))
    assert caught.value.path == "tp"
