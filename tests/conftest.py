"""What all tests share.

No deadline for an example of a property, and none for drawing one: a machine that is busy with
something else stops a test for longer than any. The examples are the same in every run, so that a
run that fails fails again; `make properties` draws others. And a test's clusters are not found by a
person's commands, nor theirs by it. ``TANDEM_FIRST_EXAMPLE`` asks for no smaller example than the
first that fails.

Nothing that is imported to collect tests is ever garbage: while that goes on no collector looks for
any, and later none looks through it, which halves what a process of pytest costs before its first
test.
"""

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.time_budget import (  # noqa: F401 - pytest finds its hooks here
    pytest_runtest_logreport,
    pytest_sessionfinish,
    pytest_terminal_summary,
)

settings.register_profile(
    "tandem",
    deadline=None,
    derandomize=not os.environ.get("TANDEM_OTHER_EXAMPLES"),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target]
    + ([] if os.environ.get("TANDEM_FIRST_EXAMPLE") else [Phase.shrink, Phase.explain]),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tandem")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _state_of_tests() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="tandem-state-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        yield
        del os.environ["XDG_STATE_HOME"]
