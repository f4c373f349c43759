"""What cannot be measured is refused by field, and what runs is what a server would run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from bench.engine.command import parse_counts, parse_range
from bench.engine.options import (
    EFFECTIVE,
    Axis,
    DecodeOptions,
    PrefillOptions,
    Routing,
    Setup,
)
from deploy.cli import build_parser, main
from runtime.config import DecodeSection, PrefillSection
from runtime.errors import ConfigError


def decode(*settings: str, dp: int = 1, **fields: Any) -> DecodeOptions:
    return DecodeOptions(setup=Setup(dp=dp, settings=settings), **fields)


@pytest.mark.parametrize(
    ("make", "field", "fix"),
    [
        (lambda: PrefillOptions(setup=Setup(tp=2, dp=2)), "prefill.dp", "how many ranks there are"),
        (
            lambda: PrefillOptions(
                setup=Setup(tp=2, shard_of=8, settings=("prefill.expert_parallel=false",))
            ),
            "prefill.expert_parallel",
            "leave it out",
        ),
        (lambda: Setup(seconds=0), "seconds", "30"),
        (lambda: Setup(warm_up_s=-1), "warm-up", "at least 0"),
        (lambda: Setup(temperature=-0.1), "temperature", "at least 0"),
        (lambda: Setup(top_p=0.0), "top-p", "at most 1"),
        (lambda: Setup(dp=2, shard_of=8), "shard-axis", "dp"),
        (lambda: PrefillOptions(setup=Setup(), batch_tokens=5000), "batch-tokens", "4096"),
        (
            lambda: PrefillOptions(setup=Setup(settings=("prefill.scatter_tokens=on",))),
            "prefill.scatter_tokens",
            "prefill.tp above 1",
        ),
        (
            lambda: PrefillOptions(setup=Setup(settings=("prefill.max_num_seqs=3",))),
            "prefill.max_num_seqs",
            "4",
        ),
        (lambda: decode(context_lens=(9, 3)), "context-lens", "1500-1660"),
        (lambda: decode(context_lens=(1, 3)), "context-lens", "1500-1660"),
        (lambda: decode(output_len=0), "output-len", "at least 1"),
        (lambda: decode(dp=2, requests=(4,)), "requests-per-rank", "128,128"),
        (lambda: decode(dp=2, requests=(0, 4)), "requests-per-rank", "largest number first"),
        (lambda: DecodeOptions(setup=Setup(tp=2)), "tp", "--dp"),
        (lambda: decode("decode.max_num_seqs=64"), "decode.max_num_seqs", "128"),
        (lambda: decode("prefill.kv_dtype=fp8"), "--set", "a field of decode"),
        (lambda: decode("decode.dp=2"), "--set", "--dp"),
        (lambda: decode("decode.instances=2"), "--set", "overlap_shared_expert"),
        (lambda: decode("decode.two_batch_overlap=on"), "decode.two_batch_overlap", "leave it out"),
        (lambda: decode("decode.kv_type=fp8"), "decode.kv_type", "kv_dtype?"),
        (lambda: parse_range("long", "context-lens"), "context-lens", "1500-1660"),
        (lambda: parse_counts("8,x", "requests-per-rank"), "requests-per-rank", "128,0,0,0"),
    ],
)
def test_a_wrong_option_is_named_with_its_fix(
    make: Callable[[], object], field: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert (caught.value.path, fix in caught.value.fix) == (field, True), caught.value


SIZES = {
    "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_tokens_per_rank",
    "tp", "dp", "device",
}  # fmt: skip


def modes(section: PrefillSection | DecodeSection) -> dict[str, object]:
    """All that is no size."""
    return {name: value for name, value in dataclasses.asdict(section).items() if name not in SIZES}


@pytest.mark.parametrize("axes", [{"tp": 1}, {"tp": 4}, {"dp": 4}])
def test_prefill_runs_with_the_defaults_of_a_server(axes: dict[str, int]) -> None:
    section = PrefillOptions(setup=Setup(**axes)).section  # type: ignore[arg-type]
    assert modes(section) == modes(PrefillSection())
    assert (section.num_ranks, section.device) == (max(axes.values()), "cuda")
    assert section.max_num_batched_tokens == 16384
    assert section.max_ahead == PrefillSection(device="cuda").max_ahead


@pytest.mark.parametrize("dp", [1, 4, 8])
def test_decode_runs_with_the_defaults_of_a_server(dp: int) -> None:
    section = decode(dp=dp, requests=(57,) * dp).section
    assert modes(section) == modes(DecodeSection(num_speculative_tokens=0)), "without --drafts none"
    assert (section.dp, section.device, section.max_num_seqs) == (dp, "cuda", 128)
    assert section.max_tokens_per_rank == 128, "not the batch: a worker does not know it"


def test_more_requests_than_places_get_places_and_room() -> None:
    section = decode(dp=4, requests=(200, 0, 0, 0)).section
    assert section.max_num_seqs == 200
    assert section.max_tokens_per_rank == 224
    assert section.max_tokens_per_rank * 4 % 128 == 0


def test_a_field_of_the_configuration_is_set_as_in_a_cluster() -> None:
    section = decode("decode.kv_dtype=fp8", "decode.dispatcher=gathered").section
    assert (section.kv_dtype, section.dispatcher) == ("fp8", "gathered")
    setup = Setup(dp=4, settings=("prefill.two_batch_overlap=on",))
    assert PrefillOptions(setup=setup).section.two_batch_overlap == "on"


@pytest.mark.parametrize(
    ("role", "section"), [("prefill", PrefillSection), ("decode", DecodeSection)]
)
def test_what_can_be_set_exists(role: str, section: type[PrefillSection | DecodeSection]) -> None:
    assert EFFECTIVE[role] <= {field.name for field in dataclasses.fields(section)}


def test_a_rank_alone_plays_one_of_many_that_have_their_own_tokens() -> None:
    assert Setup(shard_of=8, shard_axis=Axis.DP).played_ranks == 8
    assert Setup(shard_of=8, shard_axis=Axis.TP).played_ranks == 0
    assert Setup(dp=4, shard_of=8, shard_axis=Axis.DP).played_ranks == 0


def test_the_command_line_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", "--device", "cpu", "--batch-tokens", "5000"]) == 2
    assert "error: batch-tokens = 5000" in capsys.readouterr().err
    assert main(["bench", "prefill", "--model-shape", "nothing"]) == 2
    assert "model-shape" in capsys.readouterr().err
    assert main(["bench", "decode", "--model-shape", "tiny", "--dp", "3"]) == 2
    assert "ep = 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", "prefill", "--ttft", "maybe"])
    assert "neither on nor off" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", "decode", "--batch", "3", "--requests-per-rank", "3,0"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_figure_is_taken_over_half_a_minute_with_uniform_routing_unless_told_otherwise() -> None:
    for subject in ("prefill", "decode"):
        arguments = build_parser().parse_args(["bench", subject])
        assert arguments.seconds == Setup().seconds == 30.0
        assert arguments.warm_up == Setup().warm_up_s
        assert Routing(arguments.routing) is Setup().routing is Routing.UNIFORM
        assert (arguments.temperature, arguments.top_p) == (1.0, 1.0)


def test_contexts_have_two_names() -> None:
    for flag in ("--context-lens", "--context"):
        arguments = build_parser().parse_args(["bench", "decode", flag, "200-8000"])
        assert parse_range(arguments.context_lens, "context-lens") == (200, 8000)
    assert parse_range("4096", "context-lens") == (4096, 4096)
