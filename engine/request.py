"""One request as the engine sees it: tokens, KV blocks, and how far the KV is valid.

A `Request` holds no status and no timers: each role keeps its own life cycle around it. It knows
nothing of text. The scheduler that owns a request is the only one that changes it; the model runner
reads. Invariant: the KV of tokens [0, num_computed_tokens) is valid in the blocks of `block_table`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from grammar.constraints import AnyMatcher
from runtime.block_hash import hash_block, root_hash
from runtime.errors import InternalError, TandemError
from runtime.sampling import FinishReason, SamplingParams, finish_reason_after


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request inside one worker. Two requests are equal only if they are the same object.

    Attributes:
        request_id: the caller's id, unique in the worker.
        prompt_token_ids: the prompt, at least one token; never changed.
        sampling: how to choose tokens.
        block_table: block ids in order of positions; block i holds tokens [i*bs, (i+1)*bs).
        num_computed_tokens: leading tokens of prompt + output whose KV is valid.
        num_launched_tokens: tokens after those that steps run whose results nobody has read yet.
        num_cached_tokens: leading tokens that a prefix cache gave (a multiple of the block size).
        num_context_tokens: tokens that were known when this worker took the request on, whose KV a
            prefill worker computes: the prompt, and the output of an earlier try.
        output_token_ids: tokens sampled so far, by whomever; the last one has no KV yet.
        block_hashes: chained hashes of the leading whole blocks, grown by `update_block_hashes`.
        cache_salt: separates the prefix caches of tenants.
        matcher: of the constraint of `sampling`, once its grammar is compiled.
        is_held: launched steps give it no token, and it runs nothing until none is in flight.
        draft_token_ids: what whoever sampled the last token takes for those after it; no tokens of
            the request, and no guess any more once one is appended.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    num_cached_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: str = ""
    matcher: AnyMatcher | None = None
    is_held: bool = False
    draft_token_ids: tuple[int, ...] = ()
    num_context_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty; give at least one token")
        self.num_context_tokens = self.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, which is also the output index of the next one."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that no step has run or runs: they come before the next can be sampled."""
        return max(self.num_tokens - self.num_computed_tokens - self.num_launched_tokens, 0)

    @property
    def is_in_step(self) -> bool:
        """Whether a step was launched with it whose results nobody has read."""
        return self.num_launched_tokens > 0

    @property
    def num_unread_tokens(self) -> int:
        """Output that launched steps sample and nobody has read: its last one has no KV yet."""
        if not self.num_launched_tokens:
            return 0
        num_run = self.num_computed_tokens + self.num_launched_tokens
        return max(num_run + 1 - self.num_tokens, 0)

    @property
    def is_bound_by_known(self) -> bool:
        """Whether it has the matcher of its constraint, or no constraint."""
        return self.matcher is not None or self.sampling.constraint is None

    @property
    def is_ready(self) -> bool:
        """Whether a token can be sampled: what it must look like is known."""
        if self.matcher is None:
            return self.sampling.constraint is None
        return not self.is_held and self.matcher.is_ready

    @property
    def failure(self) -> TandemError:
        """Why a step that was to sample a token for it found none."""
        if self.matcher is not None and self.matcher.error is not None:
            return self.matcher.error
        # Its own numbers, or those of a device that is going.
        return InternalError("the model's logits are not finite", suspect=True)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return tokens [start, end) of prompt followed by output."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]

    def num_blocks_needed(self, num_scheduled_tokens: int, block_size: int) -> int:
        """Return how many more blocks the next `num_scheduled_tokens` tokens need."""
        num_run = self.num_computed_tokens + self.num_launched_tokens
        num_lacking = num_run + num_scheduled_tokens - len(self.block_table) * block_size
        return num_blocks_for(num_lacking, block_size) if num_lacking > 0 else 0

    def update_block_hashes(self, block_size: int) -> Sequence[bytes]:
        """Hash the whole blocks of computed and uncomputed tokens that lack a hash; return all.

        A block may be committed to a prefix cache only once `num_computed_tokens` covers it.
        """
        for start in range(
            len(self.block_hashes) * block_size, self.num_tokens - block_size + 1, block_size
        ):
            parent = self.block_hashes[-1] if self.block_hashes else root_hash(self.cache_salt)
            self.block_hashes.append(hash_block(parent, self.token_ids(start, start + block_size)))
        return self.block_hashes

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Return why the request is over after its last output token, or None if it goes on.

        Args:
            max_model_len: the context length in tokens, prompt and output together.
        """
        if not self.output_token_ids:
            return None
        reason = finish_reason_after(
            self.output_token_ids[-1],
            num_output_tokens=len(self.output_token_ids),
            num_tokens=self.num_tokens,
            params=self.sampling,
            max_model_len=max_model_len,
        )
        num_output, matcher = len(self.output_token_ids), self.matcher
        is_complete = matcher is not None and matcher.is_over_after(num_output)
        return FinishReason.COMPLETE if is_complete and reason is not FinishReason.STOP else reason


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: tokens [start, end) of its prompt and output are run.

    Stays what it is while the request moves on, because the step's results may be read later.

    Attributes:
        request: whose.
        num_scheduled_tokens: how many tokens are run.
        start: first position that is run.
        end: position after the last one that is run; also the context length of the step.
        samples: whether the step reaches the end of the tokens, so that one is sampled.
        num_unread: how many of the tokens the host does not know, because the step before samples
            them: 0, or 1 for the last.
        is_lost: what is sampled is nobody's token; known once the step is launched.
    """

    request: Request
    num_scheduled_tokens: int
    start: int = field(init=False)
    end: int = field(init=False)
    samples: bool = field(init=False)
    num_unread: int = field(init=False)
    is_lost: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        request = self.request
        self.start = request.num_computed_tokens + request.num_launched_tokens
        self.end = self.start + self.num_scheduled_tokens
        num_beyond = self.end - request.num_tokens
        self.samples = num_beyond >= 0
        self.num_unread = num_beyond if num_beyond > 0 else 0
        assert self.num_scheduled_tokens > 0
        assert not self.num_unread or self.num_unread <= request.num_unread_tokens

    def lose(self) -> None:
        """Have the step sample nothing for the request: the mask of its row is not there."""
        self.is_lost = self.request.is_held = True

    @property
    def num_prompt_logprob_rows(self) -> int:
        """Leading positions of the step whose logits are wanted for the next *prompt* token."""
        if self.request.sampling.num_prompt_logprobs < 0:
            return 0
        return max(min(self.end, self.request.num_prompt_tokens - 1) - self.start, 0)
