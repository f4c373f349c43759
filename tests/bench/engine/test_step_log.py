"""Tokens of two runs are compared as far as both went; slow steps are told by kind."""

from pathlib import Path

import numpy as np
import pytest

from bench.engine.moved import describe_tails
from bench.engine.options import DecodeOptions, Setup
from bench.engine.step_log import (
    NOBODY,
    Tokens,
    compare_tokens,
    describe_tokens,
    open_tokens,
    save_log,
)
from runtime.errors import ConfigError


def tokens(num_steps: int) -> Tokens:
    """Of two ranks, of which the second has a request less."""
    drawn = np.arange(num_steps * 6, dtype=np.int32).reshape(num_steps, 2, 3)
    drawn[:, 1, 2] = NOBODY
    return drawn


def test_as_many_steps_are_compared_as_both_have() -> None:
    told = compare_tokens(tokens(40), tokens(70), first_flip=31)
    assert told == {
        "steps": 40,
        "steps_since_first_flip": 9,
        "tokens": 200,
        "differing_tokens": 0,
        "requests": 5,
        "differing_requests": 0,
        "first_differing_step": None,
    }


def test_what_differs_is_counted() -> None:
    other = tokens(40)
    other[7:9, 0, 1] += 1
    other[20, 1, 0] += 1
    told = compare_tokens(tokens(40), other)
    assert (told["differing_tokens"], told["differing_requests"]) == (3, 2)
    assert told["first_differing_step"] == 7


def test_runs_of_unlike_length_have_digests_in_common() -> None:
    short, long = describe_tokens(tokens(40)), describe_tokens(tokens(70))
    assert (short["tokens"], short["distinct"]) == (200, 200)
    assert isinstance(short["digest_of_steps"], dict)
    assert isinstance(long["digest_of_steps"], dict)
    assert list(long["digest_of_steps"]) == ["32", "64"]
    assert short["digest_of_steps"]["32"] == long["digest_of_steps"]["32"]


def options(path: Path, **fields: object) -> DecodeOptions:
    given = {"requests": (3, 2), "same_text_as": str(path), **fields}
    return DecodeOptions(setup=Setup(dp=2), **given)  # type: ignore[arg-type]


def test_a_log_is_read_again_and_one_of_other_requests_refused(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.npz"
    save_log(path, tokens(9), step_s=[0.1, 0.2], kinds=["before", "flip"])
    said = open_tokens(options(path))
    assert said is not None
    assert said.others is not None
    assert np.array_equal(said.others, tokens(9))
    with pytest.raises(ConfigError, match="these are"):
        open_tokens(options(path, requests=(4, 2)))
    path.write_bytes(b"no log")
    with pytest.raises(ConfigError, match="same-text-as"):
        open_tokens(options(path))


def test_without_either_option_nobody_hears() -> None:
    assert open_tokens(DecodeOptions(setup=Setup())) is None


def test_slow_steps_are_told_by_what_they_ran_beside() -> None:
    kinds = ["before", "sending", "flip", "after", "after"]
    told = describe_tails([0.010, 0.0101, 0.013, 0.010, 0.010], kinds)
    assert list(told) == ["all", "before", "sending", "moving", "flip", "after"]
    parts = {name: part for name, part in told.items() if isinstance(part, dict)}
    assert parts["all"]["count"] == 5
    assert parts["all"]["slower"] == 1
    assert parts["moving"]["count"] == 2
    assert parts["moving"]["max"] == pytest.approx(13.0)
    assert parts["after"]["slower"] == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"drafts": 1, "step_log": "x"}, "drafts"),
        ({"drawn_inputs": True, "setup": Setup(settings=("decode.overlap_steps=on",))}, "overlap"),
    ],
)
def test_what_cannot_be_compared_is_refused(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        DecodeOptions(**{"setup": Setup(), **fields})  # type: ignore[arg-type]
