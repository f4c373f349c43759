"""What "auto" sizes come to: of a GPU on a GPU, of a laptop on a CPU, and never over a number."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.deep_ep_shape import ROW_TILE
from engine.parallel.nvlink.shape import MAX_TOKENS
from runtime.config import ClusterConfig, DecodeSection, PrefillSection
from runtime.config.file import dump_config, parse_config, with_settings
from runtime.config.sizes import AUTO, decide_tokens_per_rank
from runtime.errors import ConfigError

DEVICES = st.sampled_from(["cpu", "cuda"])


def auto_or(least: int) -> st.SearchStrategy[int | str]:
    return st.just(AUTO) | st.integers(least, 100_000)


def test_a_gpu_gets_a_gpu_s_sizes_and_a_cpu_a_laptop_s() -> None:
    def numbers(section: PrefillSection | DecodeSection) -> tuple[int, ...]:
        sizes = section.sizes
        return sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.num_blocks

    assert numbers(PrefillSection()) == (16, 1024, 256)
    assert numbers(DecodeSection()) == (32, 0, 384)
    # As many blocks as fit.
    assert numbers(PrefillSection(device="cuda")) == (64, 16384, 0)
    assert numbers(DecodeSection(device="cuda")) == (128, 0, 0)


@given(
    device=DEVICES,
    max_num_seqs=auto_or(1),
    max_num_batched_tokens=auto_or(16),
    num_blocks=auto_or(2),
)
def test_a_number_is_what_it_says_and_the_rest_what_the_device_says(
    device: str, **asked: int | str
) -> None:
    fields: tuple[tuple[type[PrefillSection | DecodeSection], tuple[str, ...]], ...] = (
        (PrefillSection, ("max_num_seqs", "max_num_batched_tokens", "num_blocks")),
        (DecodeSection, ("max_num_seqs", "num_blocks")),
    )
    for section, names in fields:
        own: dict[str, Any] = {name: asked[name] for name in names}
        decided, usual = section(device=device, **own).sizes, section(device=device).sizes
        for name in names:
            expected = getattr(usual, name) if own[name] == AUTO else own[name]
            assert getattr(decided, name) == expected
        # Decided once or twice is the same.
        numbers = {name: getattr(decided, name) for name in names}
        if device == "cuda" or numbers["num_blocks"]:
            assert section(device=device, **numbers).sizes == decided


@given(device=DEVICES, settings=st.permutations(["device", "max_num_seqs", "num_blocks"]))
def test_the_order_of_settings_says_nothing(device: str, settings: list[str]) -> None:
    """A device that the command line names counts for what the file leaves open."""
    values = {"device": device, "max_num_seqs": "7", "num_blocks": AUTO}
    config = with_settings(ClusterConfig(), [f"decode.{name}={values[name]}" for name in settings])
    wanted = DecodeSection(device=device, max_num_seqs=7)
    assert config.decode == wanted
    assert parse_config(tomllib.loads(dump_config(config))).decode.sizes == wanted.sizes


@pytest.mark.parametrize(
    ("section", "field", "bad", "fix"),
    [
        (PrefillSection, "max_num_seqs", 0, "1 or more"),
        (PrefillSection, "max_num_batched_tokens", 15, "16 or more"),
        (PrefillSection, "num_blocks", 1, "2 or more"),
        (DecodeSection, "max_num_seqs", -1, "1 or more"),
        (DecodeSection, "num_blocks", "all", '"auto", or 2 or more'),
        (DecodeSection, "max_num_seqs", "many", '"auto", or 1 or more'),
        (DecodeSection, "max_tokens_per_rank", 0, "1 or more"),
        (DecodeSection, "max_tokens_per_rank", "AUTO", '"auto", or 1 or more'),
    ],
)
def test_what_is_no_size_is_refused(
    section: type[PrefillSection | DecodeSection], field: str, bad: int | str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        section(**{field: bad})  # type: ignore[arg-type]
    assert caught.value.path.partition(".")[2] == field
    assert (caught.value.value, caught.value.fix) == (bad, fix)


@given(max_num_seqs=st.integers(1, 2000), num_drafts=st.integers(0, 3))
def test_ranks_make_room_for_the_largest_step(max_num_seqs: int, num_drafts: int) -> None:
    tokens = decide_tokens_per_rank(max_num_seqs, num_drafts)
    assert tokens % ROW_TILE == 0
    assert tokens >= max_num_seqs
    largest = max_num_seqs * (1 + num_drafts)
    if largest <= MAX_TOKENS:
        assert largest <= tokens < largest + ROW_TILE
        assert tokens <= MAX_TOKENS
    else:
        assert tokens < max(max_num_seqs, MAX_TOKENS) + ROW_TILE, "no more for drafts alone"


def test_drafts_that_are_left_open_have_room_for_one() -> None:
    section = DecodeSection(device="cuda")
    assert section.tokens_per_rank == 256
    for asked, tokens in (("auto", 256), (1, 256), (0, 128), (3, 512)):
        changed = dataclasses.replace(section, num_speculative_tokens=asked)
        assert changed.tokens_per_rank == tokens
    assert dataclasses.replace(section, max_tokens_per_rank=64).tokens_per_rank == 64
