"""The model of tests without a model, and its KV: what it says follows from what it reads back.

`ContextRunner` reads the context back from the KV pool and derives the next token from what it
finds there, so that KV in a wrong block, or of another request, gives other tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.attention.kv_spec import KVSpec
from engine.memory.kv_pool import KVPool
from engine.pending_step import StepResult
from engine.request import Request, ScheduledRequest
from engine.sampling.inputs import SampledToken
from kv_transfer.layout import KVDtype, KVLayout

BLOCK_SIZE = 4
NUM_LAYERS = 2
LATENT_DIM = 3
VOCAB_SIZE = 1000
LAYOUT = KVLayout(
    dtype=KVDtype.FLOAT32, block_size=BLOCK_SIZE, num_layers=NUM_LAYERS, head_width=LATENT_DIM
)


def make_pool(num_blocks: int) -> KVPool:
    return KVPool(num_blocks, NUM_LAYERS, BLOCK_SIZE, KVSpec.shared(LATENT_DIM))


def next_token(context: Sequence[int]) -> int:
    """The token that the imagined model puts after `context`."""
    return (sum((index + 1) * token for index, token in enumerate(context)) % 900) + 50


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    """Greedy output of the imagined model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def write_tokens(
    pool: KVPool, block_table: Sequence[int], start: int, tokens: Sequence[int]
) -> None:
    """The imagined KV: every element of a position is its token id."""
    for position, token in enumerate(tokens, start):
        block = block_table[position // BLOCK_SIZE]
        pool.data[block, :, position % BLOCK_SIZE] = float(token)


def imagine(pool: KVPool, block_table: Sequence[int], prompt: Sequence[int]) -> int:
    """The imagined model's prefill."""
    write_tokens(pool, block_table, 0, prompt)
    return next_token(prompt)


class ContextStep:
    """A step that the runner's stream comes to in its turn."""

    idle_s = None

    def __init__(
        self,
        requests: list[Request],
        tokens: Future[list[int | None]],
        is_awaited: threading.Event,
    ) -> None:
        self.requests, self.tokens, self.is_awaited = requests, tokens, is_awaited

    def collect_sampled(self) -> list[StepResult] | None:
        return None

    def collect(self) -> list[StepResult]:
        self.is_awaited.set()
        return [
            StepResult(request=request, sampled=None if token is None else SampledToken(token))
            for request, token in zip(self.requests, self.tokens.result(30), strict=True)
        ]


class ContextRunner:
    """Runs steps on a KV pool without a model; can be slowed down, stopped and broken.

    Like a device it runs them on a stream of its own, in order and after they were launched, so
    that a block that is given away too early is written by two.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._stream = ThreadPoolExecutor(1, thread_name_prefix="device")
        self.is_launched = threading.Event()
        self.is_awaited = threading.Event()
        """The loop waits for a step's end, and takes no commands meanwhile."""
        self.go = threading.Event()
        self.go.set()
        self.step_s = 0.0
        self.error: Exception | None = None
        self.unusable: set[str] = set()
        """Ids of requests whose logits are not finite."""

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: ContextStep | None = None,
        group_mean: int = 0,
        num_drafts: int | None = None,
    ) -> ContextStep:
        requests = [item.request for item in scheduled]
        rows = []
        for item in scheduled:
            known = item.request.token_ids(item.start, item.end)
            place = after.requests.index(item.request) if after and item.num_unread else -1
            rows.append((item, known, place, list(item.request.block_table)))
        unread = after.tokens if after is not None else None
        tokens = self._stream.submit(self._run_all, rows, unread)
        return ContextStep(requests, tokens, self.is_awaited)

    def run_dummy(self, *, group_mean: int = 0, num_drafts: int | None = None) -> None:
        """Nothing to take part in."""

    def _run_all(
        self,
        rows: list[tuple[ScheduledRequest, list[int], int, list[int]]],
        unread: Future[list[int | None]] | None,
    ) -> list[int | None]:
        self.is_launched.set()
        self.go.wait(60)
        threading.Event().wait(self.step_s)
        if self.error is not None:
            raise self.error
        tokens: list[int | None] = []
        for item, known, place, block_table in rows:
            if place >= 0:
                assert unread is not None
                known = [unread.result()[place] or 0]
            tokens.append(self._run(item, known, block_table))
        return tokens

    def _run(self, item: ScheduledRequest, known: list[int], block_table: list[int]) -> int | None:
        if item.request.request_id in self.unusable:
            return None
        write_tokens(self._pool, block_table, item.start, known)
        blocks = self._pool.data[block_table]
        positions = blocks.transpose(1, 2).reshape(-1, NUM_LAYERS * LATENT_DIM)[: item.end]
        assert torch.equal(positions, positions[:, :1].expand_as(positions)), "torn KV"
        return next_token([int(value) for value in positions[:, 0]])
