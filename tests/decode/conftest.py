"""Fixtures of several decode tests."""

import pytest

from tests.decode.cluster import Overlap


@pytest.fixture(params=["off", "on"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test without and with overlapped steps."""
    monkeypatch.setattr(Overlap, "steps", request.param)
