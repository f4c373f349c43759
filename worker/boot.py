"""The boot of a worker's rank: its command line and configuration, told to the engine."""

from __future__ import annotations

from engine.boot.rank import BootedRank, boot_rank
from worker.arguments import WorkerOptions
from worker.engine_options import engine_options, model_options, parallel_dims, recorded_load


def boot_worker_rank(options: WorkerOptions) -> BootedRank:
    """Boot the engine of one rank. Slow; blocks.

    Raises:
        ConfigError: a model, a device or sizes that do not fit together.
        PeerLostError: the other ranks did not come.
    """
    return boot_rank(
        model_options(options.config),
        engine_options(options.section),
        parallel_dims(options.section, options.rank),
        rendezvous=options.rendezvous,
        boot_timeout_s=options.config.cluster.boot_timeout_s,
        expert_load=recorded_load(options.config, options.role),
    )
