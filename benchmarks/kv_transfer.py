"""GB/s of KV transfer between two processes, host to host memory or GPU to GPU.

Run ``python -m benchmarks.kv_transfer [--transport nixl ...] [--device cuda]``. The same as
``tandem bench kv``; prints a JSON list with one object per transport and setting. Needs no Ray and
no cluster.
"""

from __future__ import annotations

import argparse
import sys

from deploy.kv_bench.command import add_arguments, run


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
