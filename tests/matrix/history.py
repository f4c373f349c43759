"""Answers, and what is wrong with one beside the undisturbed answer to the same request.

Pure: nothing here asks anybody.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

MOST_LOGPROB_ERROR = 2e-4
"""Between two batches of other sizes, whose sums are in another order."""
KNOWN_CODES = frozenset(
    {
        *("worker_lost", "kv_transfer_failed", "worker_restarted", "timeout"),
        *("server_is_overloaded", "server_is_draining", "server_not_ready"),
    }
)


@dataclass(slots=True)
class Choice:
    """One choice, as far as it came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: str = ""
    """Names and arguments of tool calls, one after the other."""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """Take in a choice of an event, of a completion or of a chat."""
        delta = choice.get("delta") or {}
        self.token_ids += choice.get("token_ids") or []
        self.text += choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            function = call["function"]
            self.calls += f"{function.get('name') or ''}{function.get('arguments') or ''}"
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        logprobs = choice.get("logprobs") or {}
        self.logprobs += logprobs.get("token_logprobs") or []


@dataclass(slots=True)
class Answer:
    """What one request was answered, as it came."""

    choices: list[Choice]
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    is_ended: bool = False
    """Whether the stream was brought to its end; a connection that broke has none."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self.is_ended and self.error is None


def problems(actual: Answer, undisturbed: Answer) -> list[str]:
    """What is wrong with an answer whether it is whole or not, and, if it is not, that."""
    found = [] if actual.is_whole else [_loss(actual)]
    for index, (ours, theirs) in enumerate(zip(actual.choices, undisturbed.choices, strict=True)):
        found += [f"choice {index}: {problem}" for problem in _beginning(ours, theirs)]
        if actual.is_whole:
            found += [f"choice {index}: {problem}" for problem in _rest(ours, theirs)]
    if actual.is_whole:
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            ours_used, theirs_used = actual.usage.get(name), undisturbed.usage.get(name)
            if ours_used != theirs_used:
                found.append(f"usage: {name} is {ours_used}, not {theirs_used}")
    return found


def _loss(actual: Answer) -> str:
    if actual.error is None:
        return "lost: the stream broke off"
    code = actual.error.get("code")
    known = "" if code in KNOWN_CODES else ", which no fault may lead to"
    return f"lost: {code}{known}: {actual.error.get('message')}"


def _beginning(ours: Choice, theirs: Choice) -> list[str]:
    """Whatever came must be right."""
    found = []
    pairs = itertools.zip_longest(ours.token_ids, theirs.token_ids[: len(ours.token_ids)])
    wrong = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if wrong is not None:
        found.append(f"token {wrong} is wrong: {ours.token_ids} instead of {theirs.token_ids}")
    for name in ("text", "calls"):
        mine, right = getattr(ours, name), getattr(theirs, name)
        if not right.startswith(mine):
            found.append(f"{name} {mine!r} does not begin {right!r}")
    pairs_of_logprobs = zip(ours.logprobs, theirs.logprobs, strict=False)
    error = max((abs(a - b) for a, b in pairs_of_logprobs), default=0.0)
    if error > MOST_LOGPROB_ERROR and wrong is None:
        found.append(f"log-probabilities are {error:.1e} apart")
    return found


def _rest(ours: Choice, theirs: Choice) -> list[str]:
    """Nothing of a whole choice may be missing."""
    found = []
    for name in ("token_ids", "text", "calls", "logprobs"):
        mine, right = getattr(ours, name), getattr(theirs, name)
        if len(mine) < len(right):
            found.append(f"whole, but {name} ends after {len(mine)} of {len(right)}")
        elif name == "logprobs" and len(mine) > len(right):
            found.append(f"{len(mine)} log-probabilities instead of {len(right)}")
    if ours.finish_reason != theirs.finish_reason:
        found.append(f"finish reason {ours.finish_reason} instead of {theirs.finish_reason}")
    return found
