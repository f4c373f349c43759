"""What four GPUs recorded with a fault in them, by medians: it is found, and nothing beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.ranks.detection import places_of
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, Phase, WaitWindow
from runtime.stragglers.slow_ranks import SlowKind, find_slow

pytestmark = pytest.mark.nightly

RESULTS = Path(__file__).parents[3] / "bench" / "results"
REPORTS = sorted(RESULTS.glob("2026-11-26-slow-ranks*-4xh200.json"))
NOTHING_TO_FIND = {"host-pauses", "rows"}
"""Pauses are in no median; and 27 % more rows took no longer, but 42 % did, with 256 requests."""


def window_of(recorded: dict[str, Any]) -> WaitWindow:
    """As if all blocks had been as their median was."""
    names = [phase.name.lower() for phase in Phase]
    own = 1e-6 * np.array([recorded["own_us"][name] for name in names])
    waits = 1e-6 * np.array([recorded["waits_us"][name] for name in names])
    rows = np.array(recorded["rows"])

    def blocks(figures: np.ndarray) -> np.ndarray:
        return np.repeat(figures[None], BLOCKS_OF_WINDOW, axis=0)

    return WaitWindow(
        waits_s=blocks(waits),
        first_waits_s=blocks(waits),
        own_s=blocks(own),
        own_mean_s=blocks(own),
        num_rows=blocks(rows),
        num_tokens=blocks(np.full(len(rows), 128.0)),
        num_context_tokens=blocks(np.full(len(rows), 2e5)),
    )


def faults() -> list[Any]:
    found = []
    for path in REPORTS:
        report = json.loads(path.read_text())
        for row in report["faults"]:
            if row["name"] not in NOTHING_TO_FIND or row["found_in_windows"][0]:
                found.append(pytest.param(row, id=f"{row['name']}-{path.stem[23:]}"))
    return [each for each in found if each.values[0]["name"] != "host-pauses"]


@pytest.mark.parametrize("row", faults())
def test_a_recorded_fault_is_found_and_nothing_beside_it(row: dict[str, Any]) -> None:
    expected = {(SlowKind(kind), rank, source) for kind, rank, source in row["expected"]}
    found = places_of(find_slow(window_of(row["recorded"])))
    if row["name"] == "attention-of-two" and row["fault"]["attention"] < 0.1:
        # The others did not wait for the second: the first was slower yet.
        assert found == {(SlowKind.SENDER, 0, -1)}
    else:
        assert found == expected


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem[23:])
def test_nothing_is_found_in_what_was_usual(path: Path) -> None:
    report = json.loads(path.read_text())
    assert find_slow(window_of(report["usual"])) == []
