"""How large steps and KV pools are where a file leaves it open: the device decides, here alone.

A CPU gets what a laptop runs at once; a GPU what `deploy/configs/h200` serves with, and as many
blocks as fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from runtime.config.checks import at_least
from runtime.errors import ConfigError

AUTO: Final = "auto"

_ROWS_TILE: Final = 128
"""Rows at an expert come in such tiles, whatever the number of ranks."""
_MOST_DRAFT_ROWS: Final = 512
"""Tokens of a rank beyond which stores over NVLink do not go: drafts alone are not worth that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The fields of a section of the same names, decided.

    Attributes:
        max_num_seqs: most requests of a step.
        num_blocks: of the KV pool, block 0 included; 0: as many as fit.
        max_num_batched_tokens: most prompt tokens of a step; 0 in decode, which has none.
    """

    max_num_seqs: int
    num_blocks: int
    max_num_batched_tokens: int = 0


_BY_ROLE: Final[Mapping[str, Mapping[str, Sizes]]] = {
    "prefill": {
        "cpu": Sizes(max_num_seqs=16, num_blocks=256, max_num_batched_tokens=1024),
        "cuda": Sizes(max_num_seqs=64, num_blocks=0, max_num_batched_tokens=16384),
    },
    "decode": {
        "cpu": Sizes(max_num_seqs=32, num_blocks=384),
        "cuda": Sizes(max_num_seqs=128, num_blocks=0),
    },
}


def decide_sizes(role: str, device: str, **asked: int | str) -> Sizes:
    """Return the numbers that were ``asked`` for, and for each "auto" what ``device`` is good for.

    Args:
        role: "prefill" or "decode".
        device: "cpu" or "cuda".
        asked: fields of `Sizes`.
    """
    given = {name: value for name, value in asked.items() if isinstance(value, int)}
    return replace(_BY_ROLE[role][device], **given)


def decide_tokens_per_rank(max_num_seqs: int, num_drafts: int) -> int:
    """Return the tokens of a rank's largest step in whole tiles; of one too large without drafts.

    Args:
        max_num_seqs: most requests of a step.
        num_drafts: that each may bring.
    """
    with_drafts = min(max_num_seqs * (1 + num_drafts), _MOST_DRAFT_ROWS)
    return -(-max(max_num_seqs, with_drafts) // _ROWS_TILE) * _ROWS_TILE


def check_size(path: str, asked: int | str, least: int) -> None:
    """Raise ConfigError unless a field is "auto", or a number that is not below ``least``."""
    if isinstance(asked, int):
        at_least(path, asked, least)
    elif asked != AUTO:
        problem = "is neither a number nor auto"
        raise ConfigError(path, asked, problem, f'"{AUTO}", or {least} or more')
