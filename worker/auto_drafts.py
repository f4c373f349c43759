"""What drafts come to that a file leaves open ("default", "auto"): the same in both roles.

Prefill and decode have the layer for drafts both, or neither: else their KV does not fit together,
and they never pair. So what decides is what both know, the file and the checkpoint, and never what
a device has left. Neither word refuses what would run without drafts. A number is not touched: who
asks for one is refused where it cannot be.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from engine.model.registry import read_config
from engine.model.spec import CommonConfig
from engine.weights.checkpoint import CheckpointError
from engine.weights.draft_layers import missing_draft_weight
from engine.weights.expert_format import experts_are_quantized
from runtime.config import ClusterConfig
from runtime.config.decode import DEFAULT_DRAFTS
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger
from worker.arguments import WorkerOptions
from worker.engine_options import engine_options

logger = get_logger(__name__)

_DRAFTS_BY_DEFAULT: Final = 1


def decided(options: WorkerOptions) -> WorkerOptions:
    """Return what a rank is told, with drafts decided; who starts a cluster has done so already.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    if not options.config.decode.leaves_drafts_open:
        return options
    config, why = with_possible_drafts(options.config, read_config(options.config.model.path))
    if why:
        logger.info("no drafts %s", fields(reason=why))
    return dataclasses.replace(options, config=config)


def with_possible_drafts(config: ClusterConfig, model: CommonConfig) -> tuple[ClusterConfig, str]:
    """Return ``config`` with drafts decided, and why there are none where that was left open.

    "default" becomes a number; "auto" stays, and means some, or becomes 0.

    Args:
        config: of a cluster.
        model: that it serves.
    """
    decode = config.decode
    if not decode.leaves_drafts_open:
        return config, ""
    is_default = decode.num_speculative_tokens == DEFAULT_DRAFTS
    some = with_drafts(config, _DRAFTS_BY_DEFAULT) if is_default else config
    why = _without_layer(config, model)
    if is_default and not why:
        why = _without_room(some, model)
    return (without_drafts(config), why) if why else (some, "")


def without_drafts(config: ClusterConfig) -> ClusterConfig:
    """Return ``config`` with no drafts in either role."""
    return with_drafts(config, 0)


def with_drafts(config: ClusterConfig, number: int) -> ClusterConfig:
    """Return ``config`` with so many drafts."""
    decode = dataclasses.replace(config.decode, num_speculative_tokens=number)
    return dataclasses.replace(config, decode=decode)


def _without_layer(config: ClusterConfig, model: CommonConfig) -> str:
    """Why the checkpoint cannot make drafts; "" where it can."""
    if not model.num_nextn_predict_layers:
        return "the checkpoint has no layer for multi-token prediction"
    if model.experts is None:
        return ""
    try:
        experts_are_quantized(model.experts, with_mtp=True)
        missing = ""
        if config.model.load_format == "safetensors":
            missing = missing_draft_weight(config.model.path, model.experts)
    except ConfigError as error:
        return f"with the checkpoint's layer for them {error.path} {error.problem}"
    except CheckpointError:
        return ""  # whoever starts something loads it
    return missing and f"the checkpoint's layer for them lacks {missing}"


def _without_room(config: ClusterConfig, model: CommonConfig) -> str:
    """Why there may be no room for the drafts of ``config``; "" where there is."""
    for role, section in (("prefill", config.prefill), ("decode", config.decode)):
        if section.device != "cpu" and section.sizes.num_blocks:
            return (
                f"{role}.num_blocks = {section.num_blocks}: whether a GPU has room for the layer "
                'for drafts beside so many is not known. Fix: "auto" (as many as fit), or 1 draft'
            )
    decode = config.decode
    if decode.device == "cpu" or decode.dp == 1:
        return ""
    if model.experts is None or not model.experts.num_moe_layers:
        return ""
    try:
        engine_options(decode).check_rows()
    except ConfigError as error:
        return f"with one {error}"
    return ""
