"""`tandem ranks`: the matrix as text, what is slow, and what to do."""

from __future__ import annotations

from bench.ranks.played import Fault, play
from deploy.commands.cluster.ranks import SHOWN_RANKS, render
from runtime.stragglers.rank_picture import describe, picture_of
from runtime.stragglers.slow_ranks import find_slow


def text_of(num_ranks: int, fault: Fault) -> str:
    (window,) = play(1, num_ranks, fault, seed=6)
    return render([describe(picture_of("decode-0", window, find_slow(window)))])


def test_the_matrix_and_the_findings_are_printed() -> None:
    lines = text_of(4, Fault(ranks=(2,), attention=1.3)).splitlines()
    assert lines[0].startswith("decode-0: 4 ranks, 1.")
    assert lines[1].split() == ["0", "1", "2", "3"]
    cells = [line.split() for line in lines[2:6]]
    assert [row[0] for row in cells] == ["0", "1", "2", "3"]
    assert [row[1 + rank] for rank, row in enumerate(cells)] == ["-"] * 4
    assert all(float(cells[rank][3]) > float(cells[rank][2]) for rank in (0, 3))
    assert lines[6].startswith("slow_sender: rank 2, 1.")
    assert "nvidia-smi" in lines[7]


def test_ranks_that_keep_up_are_said_to() -> None:
    assert text_of(4, Fault()).endswith("nothing is slow")


def test_of_many_ranks_those_that_are_waited_for_most_are_printed() -> None:
    text = text_of(72, Fault(ranks=(70,), attention=1.3))
    header, columns = text.splitlines()[:2]
    assert f"the {SHOWN_RANKS} of 72" in header
    assert "70" in columns.split()
    assert len(columns.split()) == SHOWN_RANKS
    assert max(map(len, text.splitlines()[1 : 2 + SHOWN_RANKS])) <= 120


def test_a_link_is_named_by_both_ends() -> None:
    text = text_of(8, Fault(ranks=(1,), source=5, link_s=10e-6))
    assert "slow_link: link from rank 5 to rank 1" in text


def test_nothing_to_show_is_explained() -> None:
    assert "decode.record_waits" in render([])
