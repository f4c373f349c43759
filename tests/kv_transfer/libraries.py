"""The transports that stand on a library, as parameters of tests.

Skipped only where the library does not load, with the reason.
"""

from __future__ import annotations

import pytest

from kv_transfer.transports.mooncake import load_mooncake
from kv_transfer.transports.nixl import load_nixl
from runtime.errors import ConfigError

LIBRARIES = ("nixl", "mooncake")
_LOADERS = {"nixl": load_nixl, "mooncake": load_mooncake}


def skip_unless_loaded(library: str) -> None:
    """Skip the test where ``library`` does not load on this machine."""
    try:
        _LOADERS[library]()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    """Each library in turn."""
    name: str = request.param
    skip_unless_loaded(name)
    return name
