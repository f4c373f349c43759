"""What each row of a step's logits is for: log-probabilities of prompt tokens, or a choice."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.host_copy import upload
from engine.request import ScheduledRequest


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Rows [start, end) of the wanted logits predict `next_ids` of the request at `index`."""

    index: int
    start: int
    end: int
    next_ids: list[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What each row of the wanted logits is for; the order is that of `logits_rows`."""

    num_requests: int
    prompt_runs: list[PromptRun]
    sample_rows: list[int]


def plan_rows(scheduled: Sequence[ScheduledRequest]) -> RowPlan:
    """Return what the rows at a step's `logits_indices` are for."""
    runs: list[PromptRun] = []
    sample_rows: list[int] = []
    row = 0
    for index, item in enumerate(scheduled):
        count = item.num_prompt_logprob_rows
        if count:
            next_ids = item.request.prompt_token_ids[item.start + 1 : item.start + 1 + count]
            num_top = item.request.sampling.num_prompt_logprobs
            runs.append(PromptRun(index, row, row + count, next_ids, num_top))
        row += count
        if item.samples:
            sample_rows.append(row)
            row += 1
    return RowPlan(len(scheduled), runs, sample_rows)


def sampled_rows(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    """Return the rows of the step that a token is sampled at."""
    rows: list[int] = []
    end = 0
    for item in scheduled:
        end += item.num_scheduled_tokens
        if item.samples:
            rows.append(end - 1)
    return rows


def select_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows of [N, ...], [len(rows), ...]; the host does not wait."""
    (index,) = upload([np.array(rows, dtype=np.int64)], tensor.device)
    return tensor.index_select(0, index)
