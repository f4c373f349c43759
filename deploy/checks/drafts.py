"""Whether a cluster has drafts, where its file leaves that open: decided before a start.

File and checkpoint decide (`worker.auto_drafts`), and the memory of the ranks of both roles where
``decode.device_memory_gib`` tells it: "default" and "auto" never refuse what runs without drafts.
"""

from __future__ import annotations

from deploy.checks.decode_memory import plan_decode_memory
from deploy.checks.prefill_memory import plan_prefill_memory
from engine.model.registry import read_config
from engine.model.spec import CommonConfig
from runtime.config import ClusterConfig
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger
from worker.auto_drafts import with_possible_drafts, without_drafts

logger = get_logger(__name__)


def with_drafts_decided(config: ClusterConfig, model: CommonConfig | None = None) -> ClusterConfig:
    """``config``, whose model is known, with drafts decided: see `decide_drafts`.

    The model is read from its folder where it is not given.

    Says in one line of the log why there are none where that was left open. A checkpoint that
    cannot be read is not looked at: whoever starts something checks it.
    """
    if not config.decode.leaves_drafts_open:
        return config
    try:
        model = model or read_config(config.model.path)
    except ConfigError:
        return config
    config, why = decide_drafts(config, model)
    if why:
        logger.info("no drafts %s", fields(reason=why))
    return config


def decide_drafts(config: ClusterConfig, model: CommonConfig) -> tuple[ClusterConfig, str]:
    """Return ``config`` with drafts decided, and why there are none where that was left open.

    "default" becomes a number; "auto" stays, and means some, or becomes 0.

    Args:
        config: with the model's compute type known, or given.
        model: that it serves.
    """
    if not config.decode.leaves_drafts_open:
        return config, ""
    some, why = with_possible_drafts(config, model)
    if why:
        return some, why
    problem = _memory_problem(some, model)
    if problem is None or _memory_problem(without_drafts(config), model) is not None:
        return some, ""  # what does not fit without them either is refused as it was asked for
    return without_drafts(config), f"with them {problem.path}: {problem.problem}"


def _memory_problem(config: ClusterConfig, model: CommonConfig) -> ConfigError | None:
    try:
        plan_prefill_memory(config, model)
        plan_decode_memory(config, model)
    except ConfigError as error:
        return error
    return None
