"""How long captured steps take by size and number of drafts: replayed a few times at the start.

The rows are invented and real: other tokens in each, so that they go to experts as a router sends
them, behind a context of some length. All of it is in the dummy block, so nothing is left behind.
What a context of another length costs, and sampling of every kind, the steps themselves tell later
(`decode.draft_costs`).
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

from engine.graphs.inputs import KEPT_DRAFTS, DecodeInputs, IntColumn, padding_columns
from engine.graphs.step_graphs import StepGraphs
from engine.request import num_blocks_for
from engine.sampling.graph_sampler import SamplingStage

CONTEXT = 1024
"""Tokens that each row attends to, if the model takes as many."""
NUM_RUNS = 3


def time_steps(
    graphs: StepGraphs,
    *,
    vocab_size: int,
    block_size: int,
    max_model_len: int,
    synchronize: Callable[[], None],
) -> dict[int, list[float]]:
    """Return the seconds of a step by its size, and by its number of drafts from 0.

    All ranks that share experts call it together: they wait for one another in every layer.

    Args:
        graphs: captured.
        vocab_size: of the model.
        block_size: tokens per block.
        max_model_len: most tokens of a request.
        synchronize: waits for the device.
    """
    costs: dict[int, list[float]] = {}
    for size in reversed(graphs.buckets):
        costs[size] = []
        for num_drafts in graphs.choices.of(size):
            inputs = invent_inputs(
                size,
                vocab_size=vocab_size,
                block_size=block_size,
                context=max(min(CONTEXT, max_model_len - num_drafts - 1), 1),
                num_drafts=num_drafts,
            )
            seconds = []
            for _ in range(NUM_RUNS):
                _invent_drafts(graphs, vocab_size)
                synchronize()
                start = time.perf_counter()
                graphs.replay(inputs, num_drafts)
                synchronize()
                seconds.append(time.perf_counter() - start)
            costs[size].append(typical(seconds))
    return costs


def invent_inputs(
    size: int, *, vocab_size: int, block_size: int, context: int, num_drafts: int
) -> DecodeInputs:
    """Return a step of `size` requests that are nobody's, each behind `context` tokens."""
    integers, floats = padding_columns(size, vocab_size)
    integers[IntColumn.TOKEN_ID] = np.random.default_rng(size).integers(vocab_size, size=size)
    integers[IntColumn.SEQ_LEN] = context
    integers[IntColumn.CAPACITY] = context + num_drafts + 1
    integers[IntColumn.DRAFT] = KEPT_DRAFTS
    width = num_blocks_for(context + num_drafts, block_size)
    return DecodeInputs(
        integers=integers,
        floats=floats,
        block_tables=np.zeros((size, width), dtype=np.int32),
        unread_ids=None,
        stage=SamplingStage.GREEDY,
        num_logprobs=[-1] * size,
    )


@torch.inference_mode()
def _invent_drafts(graphs: StepGraphs, vocab_size: int) -> None:
    """Give every slot drafts; those of padding, which the step reads, among them."""
    if graphs.kept_drafts is not None:
        graphs.kept_drafts.random_(vocab_size)


def typical(samples: Sequence[float]) -> float:
    """Return the seconds of a step that was run a few times: the first one warms up."""
    return median(samples[1:] or samples)
