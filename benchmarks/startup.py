"""Seconds from ``tandem up`` to ready, and the memory of all processes then.

Run ``python -m benchmarks.startup``. The same as ``tandem bench startup``; prints one JSON object.
Exits 1 when a limit is exceeded: 30 s and 6 GB for the built-in configuration on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from deploy.startup_bench import measure_startup
from runtime.config_file import load_config

MAX_SECONDS = 30.0
MAX_BYTES = 6 * 10**9


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, help="a TOML file (default: built in)")
    result = measure_startup(load_config(parser.parse_args().config))
    limits = {"max_seconds": MAX_SECONDS, "max_bytes": MAX_BYTES}
    print(json.dumps({**dataclasses.asdict(result), **limits}, indent=1))
    within = result.seconds_to_ready <= MAX_SECONDS and result.pss_bytes <= MAX_BYTES
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
