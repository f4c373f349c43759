"""Which running request has which slot: rows of tables that outlive a step.

A request keeps its slot from its first step here to its last, so that a step costs the host a few
array operations and not a walk over block tables and parameters. There is no call to give a slot
back: a request that a step does not run has lost it, and gets one anew if it returns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.batch import StepBounds, UnreadTokens
from engine.draft_room import most_kv_tokens
from engine.graphs.inputs import (
    KEPT_DRAFTS,
    DecodeInputs,
    FloatColumn,
    Int32Array,
    IntColumn,
    padding_columns,
)
from engine.request import Request, ScheduledRequest
from engine.sampling.graph_sampler import GraphSampler, SamplingStage
from engine.sampling.noise import mix_seed
from engine.sampling.token_mask import NO_DRAFT
from runtime.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRoom:
    """What bounds the KV of a request.

    Attributes:
        block_size: tokens per block.
        max_model_len: most tokens of prompt and output together.
    """

    block_size: int
    max_model_len: int

    def capacity(self, request: Request) -> int:
        """Return how many positions of the request have a place for KV, and may need one."""
        held = len(request.block_table) * self.block_size
        return min(held, most_kv_tokens(request, self.max_model_len))


class Slots:
    """The slots of one rank, and the mirrors on the host of what the device knows by slot."""

    def __init__(
        self,
        sampler: GraphSampler,
        max_num_blocks: int,
        bounds: StepBounds | None = None,
        *,
        room: KVRoom | None = None,
    ) -> None:
        """Take as many slots as the sampler has.

        Args:
            sampler: is told of every new owner.
            max_num_blocks: of one request.
            bounds: of what a step may name; None where nobody else's memory is at stake.
            room: for drafts; None for steps without.
        """
        self._room = room
        self._bounds = bounds
        self._sampler = sampler
        num_slots = sampler.num_slots
        self._slots: dict[Request, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._integers, self._floats = padding_columns(num_slots, sampler.vocab_size)
        self._stages = [SamplingStage.GREEDY] * num_slots
        self._tables = np.zeros((num_slots, max_num_blocks), dtype=np.int32)
        # What of which list a row of the tables holds: a preempted request returns with another.
        self._written: list[tuple[list[int], int]] = [([], 0)] * num_slots

    def inputs(
        self, scheduled: Sequence[ScheduledRequest], unread: UnreadTokens | None = None
    ) -> DecodeInputs:
        """Return the inputs of a step, after telling the sampler of new owners.

        Args:
            scheduled: each runs one token, and samples; may be empty.
            unread: holds the tokens that the host does not know.

        Raises:
            InternalError: a request names a block or a token beyond the bounds.
        """
        running = {item.request for item in scheduled}
        self._release(running)
        new = running - self._slots.keys() if self._room is not None else ()
        slots = np.array([self._slot_of(item, unread) for item in scheduled], dtype=np.int64)
        integers = self._integers[:, slots]
        seq_lens = np.array([item.end for item in scheduled], dtype=np.int64)
        integers[IntColumn.SLOT] = slots
        if self._room is not None:
            # With none of its own behind it, a request has no drafts of an earlier owner's either.
            integers[IntColumn.DRAFT] = [
                _draft(item, is_new=item.request in new) for item in scheduled
            ]
            integers[IntColumn.CAPACITY] = [self._room.capacity(item.request) for item in scheduled]
        integers[IntColumn.SEQ_LEN] = seq_lens
        integers[IntColumn.OUTPUT_INDEX] = [
            item.end - item.request.num_prompt_tokens for item in scheduled
        ]
        for row, item in enumerate(scheduled):
            if item.num_unread:
                assert unread is not None, "a token that the host does not know, and no step"
                integers[IntColumn.SOURCE, row] = unread.places[id(item.request)]
            else:
                integers[IntColumn.TOKEN_ID, row] = self._last_token(item)
        accepted = None if unread is None else unread.accepted
        assert accepted is None or self._room is not None, "drafts before a step without"
        is_full = any(self._stages[slot] is SamplingStage.FULL for slot in slots.tolist())
        return DecodeInputs(
            integers=integers,
            floats=self._floats[:, slots],
            block_tables=self._block_tables(scheduled, slots.tolist()),
            unread_ids=None if unread is None else unread.token_ids,
            unread_counts=None if accepted is None else accepted.counts,
            stage=SamplingStage.FULL if is_full else SamplingStage.GREEDY,
            num_logprobs=[item.request.sampling.num_logprobs for item in scheduled],
        )

    def drop(self, requests: Iterable[Request]) -> None:
        """Take the slots of some back: they know tokens that are nobody's."""
        self._release(self._slots.keys() - set(requests))

    def clear(self) -> None:
        """Take all slots back: what they know misses a step that was run elsewhere."""
        self._release(set())

    def _release(self, running: set[Request]) -> None:
        for request in [request for request in self._slots if request not in running]:
            slot = self._slots.pop(request)
            self._written[slot] = ([], 0)
            self._free.append(slot)

    def _slot_of(self, item: ScheduledRequest, unread: UnreadTokens | None) -> int:
        assert item.num_scheduled_tokens == 1
        assert item.samples
        request = item.request
        slot = self._slots.get(request)
        if slot is not None:
            return slot
        slot = self._slots[request] = self._free.pop()
        params = request.sampling
        self._stages[slot] = SamplingStage.of(params)
        self._integers[IntColumn.MIXED_SEED, slot] = mix_seed(params.seed)
        self._integers[IntColumn.TOP_K, slot] = _top_k(params, self._sampler.vocab_size)
        self._floats[:, slot] = _floats(params)
        unread_ids = None
        if item.num_unread:
            assert unread is not None
            unread_ids = unread.amounts(request)
        self._sampler.assign(
            slot, params, request.prompt_token_ids, request.output_token_ids, unread_ids
        )
        return slot

    def _last_token(self, item: ScheduledRequest) -> int:
        token_ids = item.request.token_ids(item.start, item.end)
        if self._bounds is not None:
            self._bounds.check_tokens(item.request, token_ids)
        (token_id,) = token_ids
        return token_id

    def _block_tables(
        self, scheduled: Sequence[ScheduledRequest], slots: Sequence[int]
    ) -> Int32Array:
        """Return [S, B], B being the most blocks that a request has."""
        width = 0
        for item, slot in zip(scheduled, slots, strict=True):
            table = item.request.block_table
            written, count = self._written[slot]
            if written is not table:
                self._tables[slot] = 0
                count = 0
            if count != len(table):
                if self._bounds is not None:
                    self._bounds.check_blocks(item.request, table[count:])
                self._tables[slot, count : len(table)] = table[count:]
                self._written[slot] = (table, len(table))
            width = max(width, len(table))
        return self._tables[np.array(slots, dtype=np.int64), :width]


def _draft(item: ScheduledRequest, *, is_new: bool) -> int:
    """Return what is taken for the token after the last one of a request; see `IntColumn`."""
    request = item.request
    if not is_new:
        return KEPT_DRAFTS
    return (
        request.draft_token_ids[0] if request.draft_token_ids and not item.num_unread else NO_DRAFT
    )


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size


def _floats(params: SamplingParams) -> list[float]:
    values = {
        FloatColumn.TEMPERATURE: params.temperature,
        FloatColumn.TOP_P: params.top_p,
        FloatColumn.MIN_P: params.min_p,
        FloatColumn.REPETITION: params.repetition_penalty,
        FloatColumn.FREQUENCY: params.frequency_penalty,
        FloatColumn.PRESENCE: params.presence_penalty,
    }
    return [values[column] for column in FloatColumn]
