"""What cannot be measured is refused by field, and what stands for the model says so."""

import argparse
from collections.abc import Callable

import pytest

from deploy.cli import build_parser, main
from deploy.engine_bench.command import parse_range
from deploy.engine_bench.options import Axis, Collectives, DecodeOptions, PrefillOptions, Setup
from deploy.engine_bench.prefill import prefill_rates
from deploy.engine_bench.shapes import choose_model
from runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "field", "fix"),
    [
        (lambda: Setup(tp=2, dp=2), "dp", "set one of them to 1"),
        (lambda: Setup(dp=2), "ep", "2"),
        (lambda: Setup(tp=2, shard_of=8), "ep", "2"),
        (lambda: Setup(repeats=0), "repeats", "at least 1"),
        (lambda: Setup(dp=2, ep=2, shard_of=8), "shard-axis", "dp"),
        (lambda: PrefillOptions(setup=Setup(), batch_tokens=5000), "batch-tokens", "4096"),
        (
            lambda: PrefillOptions(setup=Setup(), collectives=Collectives.SYMMETRIC),
            "collectives",
            "or nccl",
        ),
        (lambda: DecodeOptions(setup=Setup(), context=(9, 3)), "context", "1500-1660"),
        (lambda: parse_range("long", "context"), "context", "1500-1660"),
    ],
)
def test_a_wrong_option_is_named_with_its_fix(
    make: Callable[[], object], field: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert (caught.value.path, caught.value.fix.endswith(fix)) == (field, True)


def test_launches_are_dependent_unless_told_otherwise() -> None:
    parse = build_parser().parse_args
    assert parse(["bench", "decode"]).dependent_launches is True
    assert parse(["bench", "decode", "--dependent-launches", "off"]).dependent_launches is False


def test_a_step_runs_whole_with_the_shared_expert_beside_it_unless_told_otherwise() -> None:
    parse = build_parser().parse_args
    usual = parse(["bench", "decode"])
    assert (usual.side_stream, usual.two_batch_overlap) == (True, False)
    other = parse(["bench", "decode", "--side-stream", "off", "--two-batch-overlap", "on"])
    assert (other.side_stream, other.two_batch_overlap) == (False, True)


def test_the_command_line_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", "--device", "cpu", "--batch-tokens", "5000"]) == 2
    assert "error: batch-tokens = 5000" in capsys.readouterr().err
    assert main(["bench", "prefill", "--model-shape", "nothing"]) == 2
    assert "model-shape" in capsys.readouterr().err
    assert main(["bench", "decode", "--model-shape", "tiny", "--dp", "3"]) == 2
    assert "ep = 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", "prefill", "--overlap", "maybe"])
    assert "neither on nor off" in capsys.readouterr().err


def test_experts_are_shared_by_all_ranks_unless_told() -> None:
    arguments = build_parser().parse_args(["bench", "prefill", "--tp", "4"])
    assert isinstance(arguments, argparse.Namespace)
    assert arguments.ep == 0


def test_the_whole_model_carries_its_own_name() -> None:
    measured = choose_model(Setup(tp=8, ep=8))
    assert measured.is_whole
    assert measured.label == "deepseek-v3 on 8 GPUs"
    rates = prefill_rates(measured, PrefillOptions(setup=Setup(tp=8, ep=8)), 0.5)
    as_run, node = rates["as_run"], rates["node"]
    assert isinstance(as_run, dict)
    assert isinstance(node, dict)
    assert as_run == {**node, "tokens": 16384}
    assert node["tokens_per_s"] == 32768


def test_a_proxy_says_what_it_is() -> None:
    setup = Setup(tp=4, ep=4, shard_of=8)
    measured = choose_model(setup)
    assert measured.label == "per-rank proxy on 4 GPUs"
    notes = " ".join(measured.notes)
    for said in ("16 of the 128 heads", "32 of 256 experts", "0.750", "0.875", "4 of 128 experts"):
        assert said in notes
    rates = prefill_rates(measured, PrefillOptions(setup=setup), 0.5)
    node = rates["node"]
    assert isinstance(node, dict)
    assert node["tokens_per_s"] == 32768, "the batch is the one of the whole node"
    assert node["num_gpus"] == 8
    assert "proxy" in node["label"]


def test_ranks_with_their_own_tokens_are_multiplied() -> None:
    setup = Setup(dp=4, ep=4, shard_of=8, shard_axis=Axis.DP)
    rates = prefill_rates(choose_model(setup), PrefillOptions(setup=setup), 0.5)
    as_run, node = rates["as_run"], rates["node"]
    assert isinstance(as_run, dict)
    assert isinstance(node, dict)
    assert as_run["tokens"] == 4 * 16384
    assert node["tokens_per_s"] == 2 * as_run["tokens_per_s"]


def test_fewer_layers_are_scaled_beside_what_was_measured() -> None:
    setup = Setup(tp=4, ep=4, layers=24)
    measured = choose_model(setup)
    assert (measured.config.num_hidden_layers, measured.config.first_k_dense_replace) == (24, 1)
    assert not measured.is_whole
    rates = prefill_rates(measured, PrefillOptions(setup=setup), 0.5)
    as_run, node = rates["as_run"], rates["node"]
    assert isinstance(as_run, dict)
    assert isinstance(node, dict)
    assert as_run["label"] == "deepseek-v3 on 4 GPUs, 24 of 61 layers"
    assert node["tokens_per_s"] == pytest.approx(as_run["tokens_per_s"] * 24 / 61)
    assert node["num_gpus"] == 4
    assert "scaled by 2.542" in node["label"]
