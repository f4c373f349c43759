"""What "auto" comes to where there can be no drafts: none, and the same in both roles.

Prefill and decode have the layer for drafts both, or neither: else their KV does not fit together,
and they never pair. So what decides is what both know, the file and the checkpoint, and never what
a device has left. A number is not touched: who asks for one is refused where it cannot be.
"""

from __future__ import annotations

import dataclasses

from engine.model.registry import read_config
from engine.model.spec import CommonConfig
from runtime.config import ClusterConfig
from runtime.logging import fields, get_logger
from runtime.worker import WorkerOptions

logger = get_logger(__name__)


def decided(options: WorkerOptions) -> WorkerOptions:
    """Return what a rank is told, with "auto" decided; who starts a cluster has done so already.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    if options.config.decode.num_speculative_tokens != "auto":
        return options
    config, why = with_possible_drafts(options.config, read_config(options.config.model.path))
    if why:
        logger.info("no drafts %s", fields(reason=why))
    return dataclasses.replace(options, config=config)


def with_possible_drafts(config: ClusterConfig, model: CommonConfig) -> tuple[ClusterConfig, str]:
    """Return ``config`` without drafts where "auto" cannot have any, and why; else as it is, "".

    Args:
        config: of a cluster.
        model: that it serves.
    """
    if config.decode.num_speculative_tokens == "auto" and not model.num_nextn_predict_layers:
        return without_drafts(config), "the checkpoint has no layer for multi-token prediction"
    return config, ""


def without_drafts(config: ClusterConfig) -> ClusterConfig:
    """Return ``config`` with no drafts in either role."""
    decode = dataclasses.replace(config.decode, num_speculative_tokens=0)
    return dataclasses.replace(config, decode=decode)
