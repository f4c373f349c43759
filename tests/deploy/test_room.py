"""How many instances fit into what is free."""

from __future__ import annotations

import pytest

from deploy.hosts.room import Resources, count_fitting

RANK = {"CPU": 1.0, "GPU": 1.0}
EIGHT = {"CPU": 8.0, "GPU": 8.0}


@pytest.mark.parametrize(
    ("bundles", "hosts", "count"),
    [
        ([RANK], [{"CPU": 3.0, "GPU": 2.0}], 2),
        ([RANK], [{"CPU": 3.0}], 0),
        ([RANK], [], 0),
        ([EIGHT], [{"CPU": 9.0, "GPU": 7.0}, {"CPU": 9.0, "GPU": 8.0}], 1),
        ([EIGHT, EIGHT], [dict(EIGHT)] * 3, 1),
        ([EIGHT, EIGHT], [{"CPU": 64.0, "GPU": 16.0}, dict(EIGHT)], 1),
        ([{"CPU": 2.0}], [{"CPU": 3.0}, {"CPU": 5.0}], 3),
        # A small bundle does not take the place that only a large one needs.
        ([RANK, EIGHT], [{"CPU": 64.0, "GPU": 1.0}, {"CPU": 64.0, "GPU": 8.0}], 1),
    ],
)
def test_so_many_fit(bundles: list[Resources], hosts: list[Resources], count: int) -> None:
    assert count_fitting(bundles, hosts) == count


def test_what_asks_for_nothing_ends() -> None:
    assert count_fitting([{}], [{}]) == 1024
