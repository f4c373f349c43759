"""Whether ranks of a proxy play those of a larger group; how is in `bench.engine.played`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from runtime.errors import ConfigError

_NAME = "play-ranks"
_STANDING = ("expert_load", "rebalance_experts")
"""Fields that say where experts stand."""


class Plays(StrEnum):
    """Whose rows the experts of a proxy's ranks get: those of a smaller model, or those of ranks of
    the larger group, the busiest one among them, where experts stand in order, as a start by a
    recording (`expert_load`) places them, or as a plan moves them.
    """

    NOTHING = ""
    IN_ORDER = "in-order"
    RECORDED = "recorded"
    PLANNED = "planned"


PLAYS_LABELS: Mapping[Plays, str] = {
    Plays.IN_ORDER: "in order",
    Plays.RECORDED: "placed by a recording",
    Plays.PLANNED: "moved by a plan",
}
"""Part of a label."""


def check_plays(
    plays: Plays, *, is_skewed: bool, dp: int, shard_of: int, settings: Sequence[str]
) -> None:
    """Refuse what cannot be played.

    Args:
        plays: what is asked for.
        is_skewed: whether experts are chosen by a skew.
        dp: ranks.
        shard_of: of the larger group.
        settings: "SECTION.FIELD=VALUE" each.

    Raises:
        ConfigError: by the option's name.
    """
    if not plays:
        return
    if not is_skewed:
        raise ConfigError(_NAME, str(plays), "rows are those of a skew", "--routing skewed")
    if dp < 2 or shard_of <= dp:
        problem = f"{dp} rank(s) with own tokens, of {shard_of or dp}, play none of a larger group"
        raise ConfigError(_NAME, str(plays), problem, "--dp 4 --shard-of 8")
    for setting in settings:
        field = setting.partition("=")[0].rpartition(".")[2]
        if field in _STANDING:
            problem = f"--{_NAME} {plays} says where experts stand"
            raise ConfigError("--set", setting, problem, f"leave it or --{_NAME} out")
