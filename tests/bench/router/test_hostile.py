"""The benchmark of hostile clients builds what it says."""

from __future__ import annotations

import orjson
import pytest

from bench.router.hostile import BODIES, BODY_BYTES, Felt, hostile_body

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("kind", BODIES)
def test_hostile_bodies_are_large_json(kind: str) -> None:
    head, _, body = hostile_body(kind, "m").partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert kind == "fitting" or len(body) > 0.99 * BODY_BYTES
    assert len(body) < 8 * 2**20
    if kind != "lists":  # millions of them keep the garbage collector of a test busy
        assert orjson.loads(body)["model"] == "m"


def test_a_row_of_the_table_has_percentiles() -> None:
    felt = Felt(health_ms=[1.0, 3.0], request_ms=[5.0, 5.0], num_failed=2)
    assert felt.row("idle").split()[:6] == ["idle", "2.0", "3.0", "5.0", "5.0", "2"]
