"""`python -m tests.integration.fixed_decode`: a decode rank on a CPU with a GPU's fixed shapes.

Every step is padded to the next batch size and sampled from tables by slot, as graphs do it, but
called instead of replayed.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from decode.assembly import ModelSide, build_model_side
from decode.worker import DecodeDriver
from engine.graphs.graph_runner import GraphRunner, capture_steps
from worker.arguments import WorkerOptions
from worker.host import WorkerHost
from worker.run import RankService, run_worker


def fixed_runner(options: WorkerOptions, side: ModelSide) -> GraphRunner:
    """The runner of a GPU for a rank that was booted without."""
    assert isinstance(side.runner, GraphRunner)
    return capture_steps(
        side.runner.plain,
        max_num_seqs=options.config.decode.sizes.max_num_seqs,
        max_model_len=side.max_model_len,
    )


def build_fixed(options: WorkerOptions) -> ModelSide:
    """Boot the rank as ever, and give it that runner."""
    side = build_model_side(options)
    return replace(side, runner=fixed_runner(options, side))


def make_service(options: WorkerOptions) -> RankService:
    """The service of this rank."""
    return WorkerHost(options, DecodeDriver(options, build_fixed))


if __name__ == "__main__":
    sys.exit(run_worker("decode", sys.argv[1:], make_service))
