"""A cluster is planned by a model's published numbers, before its weights are there."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from bench.shapes import DEEPSEEK_V3
from deploy.checkpoint.model_shapes import read_model_shape, shape_names, with_shape
from deploy.checks.cluster import resolve_config
from deploy.checks.prefill_memory import plan_prefill_memory
from deploy.cli import main
from engine.config import DeepseekV3Config
from runtime.config import ClusterConfig, DecodeSection, PrefillSection
from runtime.errors import ConfigError

GPUS = "--set prefill.device=cuda --set decode.device=cuda"
H200 = "--set decode.device_memory_gib=139"


def test_the_numbers_are_those_of_the_published_files() -> None:
    model = read_model_shape("deepseek-v3").model
    assert isinstance(model, DeepseekV3Config)
    assert dataclasses.replace(model, eos_token_ids=(), bos_token_id=None) == DEEPSEEK_V3
    assert not model.remarks, "nothing is left out that the published file says"
    for name in ("deepseek-v3-0324", "deepseek-r1", "deepseek-r1-0528", "deepseek-v3.1"):
        assert read_model_shape(name).model == model
    kimi = read_model_shape("kimi-k2").model
    assert isinstance(kimi, DeepseekV3Config)
    assert (kimi.n_routed_experts, kimi.num_moe_layers, kimi.n_group) == (384, 60, 1)
    assert kimi.num_attention_heads == 64
    assert read_model_shape("kimi-k2-0905").model.max_position_embeddings == 262144


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_is_one_that_can_be_planned(name: str) -> None:
    shape = read_model_shape(name)
    # YaRN stretches the original length to what the model takes.
    model = shape.model
    assert isinstance(model, DeepseekV3Config)
    assert model.yarn is not None
    stretched = model.yarn.factor * model.yarn.original_max_position_embeddings
    assert stretched == model.max_position_embeddings
    assert (shape.refusal is None) == name.startswith("deepseek")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("deepseek-v33", "did you mean deepseek-v3?"),
        ("deepseek-ai/DeepSeek-R1", "did you mean deepseek-r1?"),
        ("kimi-k3", "did you mean kimi-k2?"),
        ("gpt", "one of deepseek-v3, "),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(
    name: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "--model-shape", name]) == 2
    assert f"--model-shape = '{name}': is no model whose numbers ship. Fix: {fix}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        # The command of the first page: on GPUs that are large enough.
        ("deepseek-v3 --devices 8 --set prefill.tp=4 --set decode.dp=4", "at least 171.2 GB"),
        (f"DeepSeek-R1 --devices 16 --set prefill.tp=8 --set decode.dp=8 {H200}", "KV blocks in"),
        (
            f"deepseek-v3 --devices 8 --set prefill.tp=4 --set decode.dp=4 {H200}",
            "error: prefill.tp = 4: weights of at least 171.2 GB a rank do not fit in a GPU of "
            "139 GiB. Fix: 8 or more ranks",
        ),
        (
            f"deepseek-r1 --devices 12 --set prefill.tp=8 --set decode.dp=4 {H200}",
            "error: decode.dp = 4: weights of ",
        ),
        (
            "deepseek-r1 --devices 8 --set prefill.tp=8 --set decode.dp=8",
            "error: decode.dp = 8: all ranks together need 16 CUDA devices, this machine has 8",
        ),
        (
            f"kimi-k2 --devices 8 --set prefill.tp=4 --set decode.dp=4 {H200}",
            "error: prefill.tp = 4: weights of at least 257.3 GB a rank do not fit",
        ),
        (
            f"kimi-k2 --devices 16 --set prefill.tp=8 --set decode.dp=8 {H200}",
            "error: prefill.tp = 8: beside 128.6 GB of weights a rank with a GPU of 139 GiB has "
            "room for a request of 50247 tokens",
        ),
        (
            f"kimi-k2 --devices 16 --set prefill.tp=8 --set decode.dp=8 {H200} "
            "--set model.max_model_len=32768",
            "error: decode.dp = 8: weights of ",
        ),
    ],
)
def test_what_fits_is_said(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape, *more = shlex.split(f"{command} {GPUS}")
    status = main(["validate", "--model-shape", shape, *more])
    out, error = capsys.readouterr()
    assert status == (2 if said.startswith("error") else 0), error
    assert said in (error if status else out)
    # What of the model is not served is named in any case, and first.
    refusal = read_model_shape(shape).refusal
    assert out.startswith(f"not served   {refusal}") == (refusal is not None)


def test_a_model_that_is_not_served_is_refused_once_its_numbers_are_looked_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"--devices 32 --set prefill.tp=16 --set decode.dp=16 {H200} {GPUS}"
    status = main(["validate", "--model-shape", "kimi-k2", *command.split()])
    out, error = capsys.readouterr()
    assert "decode rank  24 experts, at most " in out
    refusal = read_model_shape("kimi-k2").refusal
    assert status == (2 if refusal else 0)
    assert error == (f"error: {refusal}\n" if refusal else "")


def test_the_sizes_are_shown_as_they_come_to(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--devices 8 --set prefill.tp=8 --set decode.max_num_seqs=7"
    command += " --set model.max_model_len=1000 --set prefill.device=cuda"
    assert main(["validate", "--model-shape", "deepseek-r1", *command.split()]) == 0
    out = capsys.readouterr().out
    assert "prefill step 64 requests and 16384 tokens, as many KV blocks as fit\n" in out
    assert "decode step  7 requests, 384 KV blocks\n" in out
    assert "model        deepseek-r1 (as deepseek-r1 is published)\n" in out


@pytest.mark.parametrize("asked", [{"tp": 2}, {"dp": 2}, {"tp": 4, "num_redundant_experts": 32}])
@pytest.mark.parametrize("name", ["deepseek-r1", "kimi-k2"])
def test_following_the_fix_of_prefill_helps(name: str, asked: dict[str, int]) -> None:
    shape = read_model_shape(name)

    def plan(**changes: int) -> None:
        config = ClusterConfig(
            prefill=PrefillSection(device="cuda", **{**asked, **changes}),
            decode=DecodeSection(device="cuda", device_memory_gib=192.0),
        )
        config = with_shape(config, shape)
        short = dataclasses.replace(config.model, max_model_len=1024)
        config = dataclasses.replace(config, model=short)
        plan_prefill_memory(resolve_config(config, shape=shape.model), shape.model)

    with pytest.raises(ConfigError) as caught:
        plan()
    axis = caught.value.path.removeprefix("prefill.")
    ranks = re.match(r"(\d+) or more ranks", caught.value.fix)
    assert ranks is not None
    plan(**{axis: int(ranks[1])})


def test_given_blocks_of_prefill_fit_or_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"--devices 16 --set prefill.tp=8 --set decode.dp=8 {H200} {GPUS}"
    words = ["validate", "--model-shape", "deepseek-r1", *command.split()]
    assert main([*words, "--set", "prefill.num_blocks=30000"]) == 2
    error = capsys.readouterr().err
    found = re.search(r"prefill\.num_blocks = 30000: at most (\d+) fit .* Fix: \"auto\"", error)
    assert found is not None
    # All of the GPU is given here; as many as fit would be within a share of it.
    assert main([*words, "--set", f"prefill.num_blocks={found[1]}"]) == 0
    assert main([*words, "--set", f"prefill.num_blocks={int(found[1]) + 1}"]) == 2


def test_a_layer_for_drafts_never_refuses_a_prefill_that_fits_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a GPU that holds a rank and one request, and not the layer beside them."""
    command = f"--devices 40 --set prefill.tp=8 --set decode.dp=32 {GPUS}"
    words = ["validate", "--model-shape", "deepseek-r1", *command.split()]
    drafts = {}
    for tenths in range(1000, 1050, 5):
        status = main([*words, "--set", f"decode.device_memory_gib={tenths / 10}"])
        found = re.search(r"^drafts +(\w+)", capsys.readouterr().out, re.MULTILINE)
        drafts[tenths] = found[1] if found and not status else "refused"
    assert [*dict.fromkeys(drafts.values())] == ["refused", "none", "1"]


def test_slices_of_experts_weigh_what_whole_ones_do() -> None:
    shape = read_model_shape("deepseek-v3")
    found = set()
    for is_whole in (True, False):
        prefill = PrefillSection(device="cuda", tp=8, expert_parallel=is_whole)
        budget = plan_prefill_memory(ClusterConfig(prefill=prefill), shape.model)
        assert budget is not None
        found.add(budget.weights)
    assert len(found) == 1
