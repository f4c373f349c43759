"""KVLayout: sizes, fingerprint, and the message of a mismatch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.layout import KVDtype, KVLayout, check_same_layout
from runtime.errors import LayoutMismatchError

DEEPSEEK = KVLayout(dtype=KVDtype.BFLOAT16, block_size=64, num_layers=61, head_width=576)


def test_sizes_of_the_real_model() -> None:
    assert DEEPSEEK.layer_bytes == 64 * 576 * 2
    assert DEEPSEEK.block_bytes == 61 * 64 * 576 * 2
    assert DEEPSEEK.layer_offset(0) == 0
    assert DEEPSEEK.layer_offset(61) == DEEPSEEK.block_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": KVDtype.FLOAT8_E4M3},
        {"block_size": 32},
        {"num_layers": 62},
        {"num_mtp_layers": 1},
        {"num_heads": 2},
        {"head_width": 512},
    ],
)
def test_any_difference_changes_the_fingerprint_and_is_named(change: dict[str, object]) -> None:
    other = replace(DEEPSEEK, **change)  # type: ignore[arg-type]
    assert other.fingerprint() != DEEPSEEK.fingerprint()
    (name,) = change
    with pytest.raises(LayoutMismatchError, match=f"{name}: ours .*, theirs ") as caught:
        check_same_layout(DEEPSEEK, other.fingerprint(), other.describe())
    for layout in (DEEPSEEK, other):
        value = getattr(layout, name)
        assert str(value.value if isinstance(value, KVDtype) else value) in str(caught.value)


def test_equal_layouts_pass() -> None:
    same = replace(DEEPSEEK)
    assert DEEPSEEK.difference(same) == ""
    check_same_layout(DEEPSEEK, same.fingerprint(), same.describe())


def test_parse_reads_what_describe_wrote() -> None:
    assert KVLayout.parse(DEEPSEEK.describe()) == DEEPSEEK


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", DEEPSEEK.describe().replace("version=3", "version=2"), "dtype=int3"],
)
def test_foreign_descriptions_are_refused(text: str) -> None:
    with pytest.raises(LayoutMismatchError):
        KVLayout.parse(text)


def test_a_layout_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers = 0"):
        replace(DEEPSEEK, num_layers=0)


def test_a_layout_of_nothing_but_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="num_mtp_layers = 61"):
        replace(DEEPSEEK, num_mtp_layers=61)


def test_workers_of_which_one_drafts_are_refused_with_the_setting() -> None:
    other = replace(DEEPSEEK, num_layers=62, num_mtp_layers=1)
    with pytest.raises(LayoutMismatchError, match=r"decode\.num_speculative_tokens"):
        check_same_layout(DEEPSEEK, other.fingerprint(), other.describe())
