"""Labels, rates and shares of a measurement, from what was measured."""

import pytest

from bench.engine.figures import decode_rates, describe_layers, prefill_rates
from bench.engine.options import Axis, DecodeOptions, PrefillOptions, Routing, Setup
from bench.engine.report import Report
from bench.engine.shapes import choose_model
from experts.data_sheets import find_sheet

SHEET = find_sheet("NVIDIA H200")


def rates_of_prefill(setup: Setup, tokens_per_s: float = 32768.0) -> tuple[Report, Report]:
    rates = prefill_rates(choose_model(setup), PrefillOptions(setup=setup), SHEET, tokens_per_s)
    as_run, node = rates["as_run"], rates["node"]
    assert isinstance(as_run, dict)
    assert isinstance(node, dict)
    return as_run, node


@pytest.mark.parametrize(
    ("routing", "said"),
    [
        (Routing.UNIFORM, "uniform routing"),
        (Routing.EVEN, "even routing, a bound: no padding, no skew"),
        (Routing.MODEL, "routing by the invented router"),
    ],
)
def test_the_whole_model_carries_its_own_name_and_its_routing(routing: Routing, said: str) -> None:
    setup = Setup(tp=8, routing=routing)
    measured = choose_model(setup)
    assert measured.is_whole
    assert measured.label == f"deepseek-v3 on 8 GPUs, {said}"
    as_run, node = rates_of_prefill(setup)
    assert as_run == node
    assert node["tokens_per_s"] == 32768


def test_a_proxy_of_shared_heads_runs_the_batch_of_the_node() -> None:
    setup = Setup(tp=4, shard_of=8)
    assert choose_model(setup).label == "per-rank proxy on 4 GPUs, uniform routing"
    _, node = rates_of_prefill(setup)
    assert node["tokens_per_s"] == 32768
    assert node["num_gpus"] == 8
    assert "proxy" in str(node["label"])


def test_ranks_with_their_own_tokens_are_multiplied() -> None:
    setup = Setup(dp=4, shard_of=8, shard_axis=Axis.DP)
    as_run, node = rates_of_prefill(setup)
    assert node["tokens_per_s"] == 2 * as_run["tokens_per_s"]  # type: ignore[operator]
    as_run, node = rates_of_prefill(Setup(shard_of=8, shard_axis=Axis.DP))
    assert node["tokens_per_s"] == 8 * as_run["tokens_per_s"], "also where one stands for eight"


def test_fewer_layers_are_scaled_beside_what_was_measured() -> None:
    setup = Setup(tp=4, layers=24)
    measured = choose_model(setup)
    assert (measured.config.num_hidden_layers, measured.config.first_k_dense_replace) == (24, 1)
    assert not measured.is_whole
    as_run, node = rates_of_prefill(setup)
    assert as_run["label"] == "deepseek-v3 on 4 GPUs, 24 of 61 layers, uniform routing"
    assert node["tokens_per_s"] == pytest.approx(32768 * 24 / 61)
    assert node["num_gpus"] == 4
    assert "scaled by 2.542" in str(node["label"])


def test_shares_of_a_gpu_are_those_of_the_arithmetic() -> None:
    setup = Setup(dp=8, shard_axis=Axis.DP)
    options, measured = DecodeOptions(setup=setup, requests=(128,) * 8), choose_model(setup)
    rates = decode_rates(measured, options, SHEET, tokens_per_s=20480.0, mean_context=4096.0)
    as_run = rates["as_run"]
    assert isinstance(as_run, dict)
    assert as_run["share_of_bound"]["data_sheet"] == pytest.approx(20480 / 34300, rel=0.01)
    assert as_run["share_of_bound"]["reached"] > as_run["share_of_bound"]["data_sheet"]
    longer = decode_rates(measured, options, SHEET, tokens_per_s=20480.0, mean_context=8192.0)
    assert longer["as_run"]["share_of_bound"]["data_sheet"] > 0.7  # type: ignore[index]
    layers = describe_layers(measured, options, SHEET, model_s=0.05, mean_context=4096.0)
    assert layers is not None
    assert layers["us_per_layer"] == pytest.approx(50_000 / 61)
    assert set(layers["share_of_bound"]) == {"data_sheet", "reached"}  # type: ignore[call-overload]
    assert describe_layers(measured, options, SHEET, model_s=None, mean_context=1.0) is None


def test_kv_in_fp8_is_half_to_read() -> None:
    found, narrow = [], find_sheet("NVIDIA H100 PCIe")
    for settings in ((), ("decode.kv_dtype=fp8",)):
        setup = Setup(dp=8, shard_axis=Axis.DP, settings=settings)
        options = DecodeOptions(setup=setup, requests=(128,) * 8)
        rates = decode_rates(
            choose_model(setup), options, narrow, tokens_per_s=1.0, mean_context=8192.0
        )
        found.append(rates["as_run"]["bound_tokens_per_s"]["data_sheet"])  # type: ignore[index]
    assert found[0] < found[1], "bound by memory, as attention is on this GPU"


def test_unequal_ranks_and_unknown_devices_have_no_bound() -> None:
    setup = Setup(dp=4, shard_axis=Axis.DP)
    unequal = DecodeOptions(setup=setup, requests=(128, 0, 0, 0))
    equal = DecodeOptions(setup=setup, requests=(128,) * 4)
    measured = choose_model(setup)
    for options, sheet in ((unequal, SHEET), (equal, None)):
        rates = decode_rates(measured, options, sheet, tokens_per_s=5.0, mean_context=100.0)
        for kind in ("as_run", "node"):
            rate = rates[kind]
            assert isinstance(rate, dict)
            assert rate["share_of_bound"] is None
            assert rate["bound_tokens_per_s"] == {}
            assert rate["tokens_per_s"] == 5.0
        layers = describe_layers(measured, options, sheet, model_s=0.1, mean_context=100.0)
        assert layers is not None
        assert layers["share_of_bound"] is None
    prefill = PrefillOptions(setup=setup)
    assert prefill_rates(measured, prefill, None, 5.0)["as_run"]["share_of_bound"] is None  # type: ignore[index]
