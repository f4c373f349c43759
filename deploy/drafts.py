"""Whether a cluster has drafts, where its file leaves that open ("auto"): decided before a start.

The checkpoint decides (`worker.auto_drafts`), and the memory of a decode rank where
``decode.device_memory_gib`` tells it: "auto" never refuses what would run without drafts.
"""

from __future__ import annotations

from deploy.decode_memory import plan_decode_memory
from engine.model.registry import read_config
from engine.model.spec import CommonConfig
from runtime.config import ClusterConfig
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger
from worker.auto_drafts import with_possible_drafts, without_drafts

logger = get_logger(__name__)


def with_drafts_decided(config: ClusterConfig) -> ClusterConfig:
    """``config``, whose model is known, with none instead of "auto" where there can be none.

    Says so in one line of the log. A checkpoint that cannot be read is not looked at: whoever
    starts something checks it.
    """
    if config.decode.num_speculative_tokens != "auto":
        return config
    try:
        model = read_config(config.model.path)
    except ConfigError:
        return config
    config, why = decide_drafts(config, model)
    if why:
        logger.info("no drafts %s", fields(reason=why))
    return config


def decide_drafts(config: ClusterConfig, model: CommonConfig) -> tuple[ClusterConfig, str]:
    """Return ``config`` without drafts where "auto" cannot have any, and why; else as it is, "".

    Args:
        config: with the model's compute type known, or given.
        model: that it serves.
    """
    config, why = with_possible_drafts(config, model)
    if why or config.decode.num_speculative_tokens != "auto":
        return config, why
    problem = _memory_problem(config, model)
    if problem is None or _memory_problem(without_drafts(config), model) is not None:
        return config, ""  # what does not fit without them either is refused as it was asked for
    return without_drafts(config), f"with them {problem.path}: {problem.problem}"


def _memory_problem(config: ClusterConfig, model: CommonConfig) -> ConfigError | None:
    try:
        plan_decode_memory(config, model)
    except ConfigError as error:
        return error
    return None
