"""What every step of a decode measurement said and took, in a file, and two such files compared.

Requests are drawn from a seed and run a fixed number of steps, so step n of two runs with the same
options has the same requests, however fast the runs are: their tokens are compared step by step as
far as both went.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from bench.engine.options import DecodeOptions
from bench.engine.report import Report
from bench.engine.session import Session
from runtime.errors import ConfigError

NOBODY: Final = -1
"""Where a rank has fewer requests than another."""

Tokens = npt.NDArray[np.int32]


class SaidTokens:
    """What one rank's requests said, step by step.

    Attributes:
        others: of an earlier run, as `gather` returned them; None where there is none.
    """

    def __init__(self, others: Tokens | None = None) -> None:
        self.others = others
        self._steps: list[Sequence[int]] = []

    def add(self, tokens: Sequence[int]) -> None:
        """Those of a step, in the order of the requests."""
        self._steps.append(tokens)

    def gather(self, session: Session) -> Tokens:
        """Return [S, R, B], tokens of all ranks as far as all have got; all ranks call."""
        counts = [len(self._steps), max(map(len, self._steps), default=0)]
        steps, width = zip(*session.gather(counts), strict=True)
        num_steps, most = int(min(steps)), int(max(width))
        own = np.full((num_steps, most), NOBODY, np.int32)
        for row, tokens in zip(own, self._steps, strict=False):
            row[: len(tokens)] = tokens
        group = session.rank.groups.boot_group
        gathered = group.all_gather(torch.from_numpy(own)[None])
        return np.ascontiguousarray(gathered.numpy().transpose(1, 0, 2))


def open_tokens(options: DecodeOptions) -> SaidTokens | None:
    """Return what takes tokens, if they are wanted; before anything is built.

    Raises:
        ConfigError: tokens of another run are no log of steps, or of other ranks or requests.
    """
    if not options.same_text_as:
        return SaidTokens() if options.step_log else None
    others = _read_tokens(Path(options.same_text_as))
    here = (options.setup.dp, max(options.requests))
    if others.shape[1:] != here:
        problem = f"is of {others.shape[1:]} ranks and requests, and these are {here}"
        raise ConfigError("same-text-as", options.same_text_as, problem, "a run of the same")
    return SaidTokens(others)


def save_log(
    path: Path,
    tokens_SRB: Tokens,
    *,
    step_s: Sequence[float],
    idle_s: Sequence[float] = (),
    kinds: Sequence[str],
) -> None:
    """Write tokens from the first step on; of the measured ones the seconds that they took, those
    that the device idled before them (empty where unknown), and the kinds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=tokens_SRB,
            step_s=np.array(step_s),
            idle_s=np.array(idle_s),
            kinds=np.array(kinds, dtype="U16"),
        )


def _read_tokens(path: Path) -> Tokens:
    try:
        with np.load(path, allow_pickle=False) as content:
            tokens: Tokens = content["tokens"]
    except (OSError, ValueError, KeyError) as error:
        problem = f"is no log of steps: {error}"
        raise ConfigError("same-text-as", str(path), problem, "a file of --step-log") from error
    return tokens


def describe_tokens(tokens_SRB: Tokens) -> Report:
    """How many, how varied, and a digest of the first 2**n steps, for each n that there is."""
    said = tokens_SRB[tokens_SRB != NOBODY]
    ends = [1 << bit for bit in range(5, 24) if 1 << bit <= len(tokens_SRB)]
    digests = {
        str(end): hashlib.sha256(np.ascontiguousarray(tokens_SRB[:end]).tobytes()).hexdigest()[:16]
        for end in ends
    }
    return {
        "steps": len(tokens_SRB),
        "tokens": int(said.size),
        "distinct": len(np.unique(said)),
        "digest_of_steps": digests,
    }


def compare_tokens(
    tokens_SRB: Tokens, others_SRB: Tokens, *, first_flip: int | None = None
) -> Report:
    """How many tokens differ, of how many requests' places, and since which step.

    Args:
        tokens_SRB: of this run, from the first step on.
        others_SRB: of another.
        first_flip: the step from which on experts stood elsewhere; None if none did.
    """
    steps = min(len(tokens_SRB), len(others_SRB))
    one, other = tokens_SRB[:steps], others_SRB[:steps]
    differs, is_said = one != other, one != NOBODY
    at = np.flatnonzero(differs.any(axis=(1, 2)))
    return {
        "steps": steps,
        "steps_since_first_flip": 0 if first_flip is None else max(steps - first_flip, 0),
        "tokens": int(is_said.sum()),
        "differing_tokens": int(differs.sum()),
        "requests": int(is_said[0].sum()) if steps else 0,
        "differing_requests": int(differs.any(axis=0).sum()),
        "first_differing_step": int(at[0]) if len(at) else None,
    }
