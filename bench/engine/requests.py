"""Requests that never run out: of a decode rank, and batches of prompts of a prefill rank.

No cluster sends them, so everything about them is drawn ahead from a seed: lengths, tokens, blocks
and the seeds of their sampling. Two requests never run the same tokens, because equal rows are
cheaper: a GPU takes less power for them, and a router sends them to the same experts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.engine.schemas import SchemaOutputs
from engine.pending_step import StepResult
from engine.request import Request, ScheduledRequest, num_blocks_for
from runtime.sampling import SamplingParams

FORCED_BIAS = 1e4
"""Logit bias of the one token that a greedy request says, beyond all that invented weights give."""
_NO_END = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoice:
    """How requests sample, each with a seed of its own.

    Attributes:
        temperature: 0 is greedy. Invented weights then say one token for ever, and the same to
            everybody; so each request is biased to another one.
        top_p: as in `SamplingParams`.
        vocab_size: of the model.
        says_one_token: bias each request to a token of its own at any temperature, so that who
            guesses its next token is right.
    """

    temperature: float
    top_p: float
    vocab_size: int
    says_one_token: bool = False

    def draw(self, generator: random.Random) -> SamplingParams:
        """The parameters of one more request."""
        token = generator.randrange(self.vocab_size)
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            seed=generator.getrandbits(64),
            max_tokens=_NO_END,
            logit_bias={token: FORCED_BIAS} if self.says_one_token or not self.temperature else {},
        )


class _Tokens:
    """Draws tokens, thousands in a fraction of a millisecond: steps wait for it."""

    def __init__(self, vocab_size: int, generator: random.Random) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(generator.getrandbits(64))

    def draw(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(self._vocab_size, size=count).tolist()
        return tokens


def draw_contexts(least: int, most: int, count: int, generator: random.Random) -> list[int]:
    """``count`` lengths, each drawn by itself and all from ``least`` to ``most`` as likely."""
    return [generator.randint(least, most) for _ in range(count)]


def num_blocks_of(context: int, output_len: int, block_size: int) -> int:
    """Blocks of a request that begins with ``context`` tokens, until its end."""
    return num_blocks_for(context + output_len, block_size)


@dataclass(slots=True, kw_only=True)
class _Place:
    """A running request, and after its end the next one.

    Attributes:
        number: of all places.
        context: tokens that each of its requests attends to at first.
        blocks: of each of its requests.
        request: the present one.
    """

    number: int
    context: int
    blocks: list[int]
    request: Request


class RunningRequests:
    """The requests of one decode rank, in the middle of their outputs at the start.

    A request runs ``output_len`` tokens; then another with a context as long takes its place, as in
    a full server. So contexts are spread in the same way at every step of a measurement. A request
    that is bound by a schema may end before.
    """

    def __init__(
        self,
        contexts: Sequence[int],
        *,
        output_len: int,
        block_size: int,
        sampling: SamplingChoice,
        generator: random.Random,
        schemas: SchemaOutputs | None = None,
        rows_each: int = 1,
        drawn_inputs: bool = False,
        hear: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Make one place for each of ``contexts``.

        Args:
            contexts: tokens that a request attends to at its first step.
            output_len: steps of a request.
            block_size: tokens of a block.
            sampling: how they sample.
            generator: of all that is drawn.
            schemas: bind the requests of every place.
            rows_each: tokens that a step may give a request.
            drawn_inputs: a request goes on with a drawn token, whatever it said.
            hear: is told what a step said, in the order of the requests.
        """
        self._drawn_inputs, self._hear = drawn_inputs, hear
        self._output_len, self._sampling, self._random = output_len, sampling, generator
        self._schemas = schemas
        self._num_steps = self._num_bound = self._num_ended = self._num_failed = 0
        self._tokens = _Tokens(sampling.vocab_size, generator)
        self._num_requests = 0
        # Two steps may be launched before one is read.
        most = output_len + 3 * (rows_each - 1)
        counts = [num_blocks_of(context, most, block_size) for context in contexts]
        self.num_blocks = max(1 + sum(counts), 2)
        """Of the pool: those of all places, and block 0, which is nobody's."""
        blocks = list(range(1, 1 + sum(counts)))
        generator.shuffle(blocks)
        self._places = []
        for number, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            own, blocks = blocks[:count], blocks[count:]
            first = self._invent(number, context, own, age=generator.randrange(output_len))
            self._places.append(_Place(number=number, context=context, blocks=own, request=first))

    def __len__(self) -> int:
        """Requests of every step."""
        return len(self._places)

    def describe_schemas(self) -> dict[str, object] | None:
        """Which schemas bound these requests, and how many of a step; None where none did."""
        if self._schemas is None:
            return None
        return {
            "fields": self._schemas.num_fields,
            "vocabulary": self._schemas.vocabulary,
            "bound_per_step": self._num_bound / max(self._num_steps, 1),
            "ended": self._num_ended,
            "failed": self._num_failed,
        }

    def close(self) -> None:
        """End what made outputs."""
        if self._schemas is not None:
            self._schemas.close()

    def schedule(self) -> list[ScheduledRequest]:
        """The next step: one token of every request; who has had all of them is followed."""
        for place in self._places:
            if self._num_run(place) >= self._output_len or self._is_over(place.request):
                place.request = self._invent(place.number, place.context, place.blocks, age=0)
            matcher = place.request.matcher
            self._num_bound += matcher is not None and matcher.is_binding
        self._num_steps += 1
        scheduled = self.peek()
        for place in self._places:
            place.request.num_launched_tokens += 1
        return scheduled

    def peek(self) -> list[ScheduledRequest]:
        """The same step without taking it: nothing may be launched that is not read."""
        return [ScheduledRequest(place.request, 1) for place in self._places]

    def take(self, results: Iterable[StepResult]) -> None:
        """Give a step's tokens to its requests, in the order of the steps."""
        said: list[int] = []
        for result in results:
            request = result.request
            # Invented weights may give no usable logits; the step was the same work.
            tokens = [token.token_id for token in result.tokens] or [0]
            said += tokens
            if self._drawn_inputs:
                tokens = self._tokens.draw(1)
            request.num_launched_tokens -= 1
            request.num_computed_tokens += len(tokens)
            request.output_token_ids += tokens
        if self._hear is not None:
            self._hear(said)

    @staticmethod
    def _num_run(place: _Place) -> int:
        request = place.request
        return request.num_computed_tokens + request.num_launched_tokens - (place.context - 1)

    def _is_over(self, request: Request) -> bool:
        """Whether its schema ended it."""
        matcher = request.matcher
        if matcher is None or not (matcher.is_over or matcher.error):
            return False
        self._num_ended += matcher.is_over
        self._num_failed += matcher.error is not None
        return True

    def _invent(self, number: int, context: int, blocks: Sequence[int], *, age: int) -> Request:
        """A request that has run ``age`` steps; the KV of all that is whatever its blocks hold."""
        known, self._num_requests = context - 1 + age, self._num_requests + 1
        *prompt, last = self._tokens.draw(known + 1)
        sampling, output, matcher = self._sampling.draw(self._random), [last], None
        if self._schemas is not None:
            bound = self._schemas.begin(number, sampling, age + 1)
            sampling, output, matcher = bound.sampling, bound.token_ids, bound.matcher
            prompt = [*prompt, last][: known + 1 - len(output)]
        return Request(
            request_id=f"request-{self._num_requests}",
            prompt_token_ids=prompt,
            sampling=sampling,
            block_table=list(blocks),
            num_computed_tokens=known,
            output_token_ids=output,
            matcher=matcher,
        )


class PromptBatches:
    """Batches of prompts of one length, of one rank that schedules.

    All of a prompt runs but for a prefix that is in the pool already, if it has one. Nobody reads
    the prefix's tokens, so all prompts have the same: drawing it anew would take as long as a part
    of the step that it delays.

    Two sets of blocks are used in turn, because a batch may be launched while the one before runs.
    """

    def __init__(
        self,
        prompt_len: int,
        num_prompts: int,
        *,
        block_size: int,
        sampling: SamplingChoice,
        generator: random.Random,
        cached_len: int = 0,
    ) -> None:
        """Prepare batches of ``num_prompts`` prompts: ``prompt_len`` tokens behind a prefix."""
        self._prompt_len, self._cached_len = prompt_len, cached_len
        self._num_prompts = num_prompts
        self._blocks = num_blocks_for(cached_len + prompt_len, block_size)
        self._sampling, self._random = sampling, generator
        self._tokens = _Tokens(sampling.vocab_size, generator)
        self._prefix = self._tokens.draw(cached_len)
        self._next_set = 0

    @property
    def num_blocks(self) -> int:
        """Of the pool: those of both sets, and block 0, which is nobody's."""
        return 1 + 2 * self._num_prompts * self._blocks

    def __len__(self) -> int:
        """Prompts of a batch."""
        return self._num_prompts

    def schedule(self, num_prompts: int | None = None) -> list[ScheduledRequest]:
        """The next batch, with other tokens; a smaller one if ``num_prompts`` says so."""
        length, count = self._prompt_len, self._blocks
        first = 1 + self._next_set * self._num_prompts * count
        self._next_set = 1 - self._next_set
        scheduled = []
        for index in range(num_prompts or self._num_prompts):
            request = Request(
                request_id=f"prompt-{index}",
                prompt_token_ids=self._prefix + self._tokens.draw(length),
                sampling=self._sampling.draw(self._random),
                block_table=list(range(first + index * count, first + (index + 1) * count)),
                num_computed_tokens=self._cached_len,
            )
            scheduled.append(ScheduledRequest(request, length))
        return scheduled

    @staticmethod
    def take(results: Iterable[StepResult]) -> None:
        """Nobody waits for a first token: the prompts are not followed."""
