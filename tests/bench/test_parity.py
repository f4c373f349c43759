"""Logits and greedy tokens equal those of transformers, over random configurations and FP8."""

import sys
from pathlib import Path

import pytest
from torch import Tensor

from bench.parity import LOGIT_TOLERANCE, ParityReport, PromptParity, compare_with_transformers
from engine.weights.fp8 import dequantize_block
from runtime.errors import ConfigError
from tests.engine.tiny import random_config, random_tensors, tiny_config, write_checkpoint

NUM_STEPS = 64
BUNDLED = Path(__file__).parents[2] / "deploy" / "models" / "tandem-python"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_configurations(tmp_path: Path, seed: int) -> None:
    write_checkpoint(tmp_path, random_config(seed), seed=seed)
    report = compare_with_transformers(tmp_path, num_prompts=3, num_steps=NUM_STEPS, seed=seed)
    assert report.max_relative_error <= LOGIT_TOLERANCE, report.format()
    assert report.greedy_agreement == 1.0, report.format()
    assert report.passed


def test_the_random_configurations_differ_where_it_matters() -> None:
    configs = [random_config(seed) for seed in range(8)]
    assert {config["q_lora_rank"] is None for config in configs} == {True, False}
    assert {config["rope_scaling"] is None for config in configs} == {True, False}
    assert {config["n_group"] for config in configs} == {1, 2, 4}
    assert {config["first_k_dense_replace"] for config in configs} == {0, 1, 2}
    assert {config["norm_topk_prob"] for config in configs} == {True, False}


def test_fp8_checkpoint(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=160, intermediate_size=144)
    write_checkpoint(tmp_path, config, fp8=True)
    report = compare_with_transformers(tmp_path, num_prompts=1, num_steps=NUM_STEPS)
    assert report.passed, report.format()


@pytest.mark.slow
def test_bundled_checkpoint() -> None:
    report = compare_with_transformers(BUNDLED, num_prompts=1, num_steps=NUM_STEPS)
    assert report.passed, report.format()


def test_rotary_halves(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(rope_interleave=False))
    report = compare_with_transformers(tmp_path, num_prompts=2, num_steps=8)
    assert report.passed, report.format()


def test_a_wrong_weight_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: our side computes with another temperature."""
    write_checkpoint(tmp_path, tensors=random_tensors(tiny_config()))
    monkeypatch.setattr("engine.attention.latent.softmax_scale", lambda config: 0.19)
    report = compare_with_transformers(tmp_path, num_prompts=2, num_steps=8)
    assert report.max_relative_error > LOGIT_TOLERANCE
    assert not report.passed
    assert "FAIL" in report.format()


def test_widths_of_which_rows_are_no_whole_16_bytes(tmp_path: Path) -> None:
    """Products of experts in transformers that are faster than the plain ones refuse these."""
    config = tiny_config(hidden_size=42, moe_intermediate_size=26, intermediate_size=50)
    write_checkpoint(tmp_path, config)
    report = compare_with_transformers(tmp_path, num_prompts=1, num_steps=4)
    assert report.passed, report.format()


@pytest.mark.parametrize("context", [2, 3, 40, 65, 66])
def test_contexts_that_are_shorter_than_the_usual_prompts(tmp_path: Path, context: int) -> None:
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=context))
    report = compare_with_transformers(tmp_path)
    assert report.passed, report.format()
    for prompt in report.prompts:
        assert 1 <= prompt.num_steps <= 64
        assert prompt.num_prompt_tokens + prompt.num_steps <= context


def test_a_context_without_room(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=1))
    with pytest.raises(ConfigError, match="no room for a prompt and a token") as caught:
        compare_with_transformers(tmp_path)
    assert caught.value.path == "max_position_embeddings"


@pytest.mark.parametrize("mistake", ["exchanged", "one scale"])
def test_a_wrong_dequantisation_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """The other side does not share it."""
    config = tiny_config(hidden_size=256, intermediate_size=256)
    write_checkpoint(tmp_path, config, fp8=True)

    def wrong(weight: Tensor, scale: Tensor, block: int) -> Tensor:
        other = scale.flip(0) if mistake == "exchanged" else scale.mean().expand(scale.shape)
        return dequantize_block(weight, other.contiguous(), block)

    monkeypatch.setattr("engine.weights.checkpoint.dequantize_block", wrong)
    report = compare_with_transformers(tmp_path, num_prompts=1, num_steps=4)
    assert report.max_relative_error > LOGIT_TOLERANCE, report.format()
    assert not report.passed


def test_transformers_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeError, match="pip install"):
        compare_with_transformers(tmp_path)


def test_report() -> None:
    prompts = tuple(
        PromptParity(num_prompt_tokens=n, relative_error=e, num_steps=10, num_equal_tokens=k)
        for n, e, k in ((7, 2e-6, 10), (33, 5e-6, 5))
    )
    report = ParityReport(path=Path("model"), prompts=prompts)
    assert report.max_relative_error == 5e-6
    assert report.greedy_agreement == 0.75
    assert not report.passed
    text = report.format()
    assert "5.00e-06" in text
    assert "5 of 10" in text
