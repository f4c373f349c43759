"""Runs a cluster of fake roles under Ray until a signal.

``python -m tests.deploy.fake_cluster FILE`` prints "ready" when it is, and "error: ..." when it
fails, with status 1 or 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.errors import ClusterError
from deploy.run import prepare, run_cluster
from deploy.state import ClusterState, Phase, run_dir_of
from runtime.config.file import load_config
from runtime.errors import ConfigError
from runtime.logging import configure_logging
from tests.deploy.fakes import fake_entrypoints


def show(state: ClusterState) -> None:
    if state.phase is Phase.READY:
        print("ready", flush=True)


def main() -> int:
    configure_logging("controller")
    config = load_config(Path(sys.argv[1]))
    run_dir = run_dir_of(config.cluster.name, config.cluster.run_dir)
    try:
        resolved = prepare(config, run_dir)
        run_cluster(resolved, run_dir, on_state=show, timeout_s=60, entrypoints=fake_entrypoints())
    except ConfigError as error:
        print(f"error: {error}")
        return 2
    except ClusterError as error:
        print(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
