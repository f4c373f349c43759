"""The bench of KV transfers: what it sends when, and what it refuses."""

from __future__ import annotations

import argparse

import pytest

from bench.kv import command
from bench.kv.sides import in_window


@pytest.mark.parametrize(("number", "in_flight"), [(24, 8), (2, 8), (8, 8), (3, 1), (0, 4)])
def test_no_more_than_asked_for_are_in_flight(number: int, in_flight: int) -> None:
    under_way: set[int] = set()
    for index, before in in_window(number, in_flight):
        if before is not None:
            under_way.remove(before)
        under_way.add(index)
        assert len(under_way) <= in_flight
    assert under_way == set(range(max(0, number - in_flight), number))


@pytest.mark.parametrize("option", ["--sustained", "--in-flight", "--prompts"])
def test_numbers_of_prompts_are_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([option, "0"])
    assert "no whole number of at least 1" in capsys.readouterr().err
