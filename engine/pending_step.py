"""A step that is launched and not read: what of it is still on the device, and how it comes home.

Made by `ModelRunner.launch` and `StepGraphs.launch_step` alike, read once by whoever launched it
(`worker.step_loop`). Who waits: `collect`, by one event behind the copies of all results, and where
a step of prompts makes drafts behind its tokens, before that `collect_sampled`, for the tokens
alone; nobody else, so a next step is launched meanwhile. What it holds belongs to it until then:
the pinned memory of the results, and the sampled tokens on the device, which the next step may read
(`unread`). Static buffers of captured steps are none of it: their tokens are copied on the device
before the next replay overwrites them. All of it is issued to the one stream of steps, so memory
that is dropped here is taken again only by what comes behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.batch import UnreadTokens
from engine.device_span import DeviceSpan
from engine.host_copy import HostCopies
from engine.request import Request, ScheduledRequest
from engine.sampling.accepted import PendingAccepted
from engine.sampling.inputs import SampledToken
from engine.sampling.logprobs import PendingLogprobs
from engine.sampling.sampler import PendingSample
from engine.sampling.step_masks import ReadTokens, take_sampled
from engine.step_error import may_fail
from grammar.guard import settle
from runtime.sampling import PositionLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step found out about one request.

    Attributes:
        request: the request of the `ScheduledRequest` in the same place.
        sampled: the next token, or None if the step ended inside the prompt, failed, or lost the
            row (`ScheduledRequest.lose`): then the request runs the same again.
        more: tokens behind it, where the step verified drafts.
        prompt_logprobs: one entry per prompt token whose predecessor was run in this step, in
            order; empty unless the request asked for them. Token 0 never has one.
        is_failed: a token was due, and the logits hold NaN or infinity, or the request's constraint
            leaves none: it has to end by its `failure`, which says nothing about the others.
        is_lost: a token was due, and its row was lost; none of the others suffer.
        draft: of the token after `sampled`, where the step made one.
        num_verified: drafts of the request that the step verified; those that were right are the
            tokens behind `sampled`.
        max_drafts: K of the step, which all its requests have rows for; 0 without drafts.
    """

    request: Request
    sampled: SampledToken | None
    more: tuple[SampledToken, ...] = ()
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    is_failed: bool = False
    is_lost: bool = False
    draft: int | None = None
    num_verified: int = 0
    max_drafts: int = 0

    @property
    def tokens(self) -> tuple[SampledToken, ...]:
        """All that the step sampled for it."""
        return () if self.sampled is None else (self.sampled, *self.more)


@dataclass(slots=True)
class SampledFirst:
    """What of a step is there before its drafts are.

    Attributes:
        copies: after which the host has it.
        results: once it is read.
    """

    copies: HostCopies
    results: list[StepResult] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step that is issued to the device. Nothing has been read from it.

    Attributes:
        scheduled: what runs.
        sample: one token for each of the scheduled that samples, in order, or with drafts one or
            more; None if none does.
        is_usable: one bool for each of these on the host, False where the logits hold NaN or
            infinity; the device's token is then any token.
        prompts: per scheduled request its prompt logprobs, in pieces.
        copies: after which the host has all of these.
        drafts: of the tokens after the sampled ones, [L] int64 on the host; None if none was made.
        sampled_first: where the layer for drafts runs behind a step that has sampled.
        span: when the device ran it; None on a CPU.
        span_before: the same of the step before it, if there was one.
    """

    scheduled: Sequence[ScheduledRequest]
    sample: PendingSample | PendingAccepted | None
    is_usable: torch.Tensor | None
    prompts: Sequence[Sequence[PendingLogprobs]]
    copies: HostCopies
    drafts: torch.Tensor | None = None
    sampled_first: SampledFirst | None = None
    span: DeviceSpan | None = None
    span_before: DeviceSpan | None = None

    @property
    def is_done(self) -> bool:
        """Whether `collect` would return at once."""
        return self.copies.is_done

    def unread(self) -> UnreadTokens | None:
        """The sampled tokens, for a step that is launched before these are read."""
        if self.sample is None:
            return None
        samplers = (item.request for item in self.scheduled if item.samples)
        places = {id(request): place for place, request in enumerate(samplers)}
        accepted = self.sample.accepted if isinstance(self.sample, PendingAccepted) else None
        return UnreadTokens(token_ids=self.sample.token_ids, places=places, accepted=accepted)

    def read_tokens(self) -> dict[int, list[int]]:
        """Wait for the step's end; the usable tokens, by `id` of their requests."""
        if self.sample is None or self.is_usable is None:
            return {}
        self.copies.wait()
        samplers = (item for item in self.scheduled if item.samples)
        tokens = zip(samplers, self.sample.token_lists(), self.is_usable.tolist(), strict=True)
        return {
            id(item.request): token_ids
            for item, token_ids, is_usable in tokens
            if is_usable and not item.is_lost
        }

    def collect_sampled(self) -> list[StepResult] | None:
        """Wait for the tokens of a step whose drafts are still being made; results without these.

        Their matchers have taken the tokens then. `collect` gives the whole.

        Returns:
            None where a step has all at once.

        Raises:
            StepError: what the step gave cannot be read.
        """
        first = self.sampled_first
        if first is None:
            return None
        first.copies.wait()
        with may_fail(torch.device("cpu"), has_joined=True):  # what it reads is on the host
            first.results = self._read()
        return first.results

    def collect(self) -> list[StepResult]:
        """Wait for the step's end; one result per scheduled request, in order.

        Their matchers have taken the tokens then; the requests themselves have not.

        Raises:
            StepError: the step is over, and what it gave cannot be read; not where
                `collect_sampled` has given tokens, which cannot be taken back.
        """
        self.copies.wait()
        if self.sampled_first is not None and self.sampled_first.results is not None:
            return self._with_drafts(self.sampled_first.results)
        with may_fail(torch.device("cpu"), has_joined=True):  # the device is through with it
            return self._with_drafts(self._read())

    def _with_drafts(self, results: list[StepResult]) -> list[StepResult]:
        if self.drafts is None:
            return results
        drafts = iter(self.drafts.tolist())
        pairs = zip(self.scheduled, results, strict=True)
        return [
            replace(result, draft=next(drafts)) if item.samples else result
            for item, result in pairs
        ]

    def _read(self) -> list[StepResult]:
        sampled = _tokens_of(self.sample)
        are_usable = self.is_usable.tolist() if self.is_usable is not None else ()
        _tell_matchers(self.scheduled, sampled, are_usable)
        tokens, usable = iter(sampled), iter(are_usable)
        accepted = self.sample if isinstance(self.sample, PendingAccepted) else None
        verified = iter(accepted.num_verified if accepted is not None else ())
        results = []
        for item, pieces in zip(self.scheduled, self.prompts, strict=True):
            token, *more = next(tokens) if item.samples else (None,)
            num_verified = next(verified, 0) if item.samples else 0
            is_failed = item.samples and not (next(usable) and _fits(item)) and not item.is_lost
            is_none = is_failed or item.is_lost
            results.append(
                StepResult(
                    request=item.request,
                    sampled=None if is_none else token,
                    more=() if is_none else tuple(more),
                    prompt_logprobs=[entry for piece in pieces for entry in piece.collect()],
                    is_failed=is_failed,
                    is_lost=item.is_lost,
                    num_verified=num_verified,
                    max_drafts=accepted.max_drafts if accepted is not None else 0,
                )
            )
        return results

    @property
    def idle_s(self) -> float | None:
        """Seconds that the device idled before this step, once it is over; None on a CPU."""
        if self.span is None or self.span_before is None:
            return None
        return self.span.gap_after(self.span_before)


def _tokens_of(
    sample: PendingSample | PendingAccepted | None,
) -> Sequence[tuple[SampledToken, ...]]:
    """Return the tokens of each request that samples, once the copies are here."""
    if sample is None:
        return ()
    if isinstance(sample, PendingAccepted):
        return sample.collect()
    return [(token,) for token in sample.collect()]


def reader_of(after: PendingStep | None) -> ReadTokens:
    """Return what waits for the tokens of the step before; without one none are unread."""
    return after.read_tokens if after is not None else dict


def _tell_matchers(
    scheduled: Sequence[ScheduledRequest],
    sampled: Sequence[Sequence[SampledToken]],
    are_usable: Sequence[bool],
) -> None:
    """Tell the matchers of a step its tokens, and wait for those that answer from elsewhere."""
    samplers = (item for item in scheduled if item.samples)
    told = []
    for item, tokens, is_usable in zip(samplers, sampled, are_usable, strict=True):
        matcher = item.request.matcher
        if matcher is not None and matcher.error is None and is_usable and not item.is_lost:
            take_sampled(item, [token.token_id for token in tokens])
            told.append(matcher)
    settle(told)


def _fits(item: ScheduledRequest) -> bool:
    """Whether the request can go on, as far as its matcher has said."""
    matcher = item.request.matcher
    return matcher is None or matcher.error is None
