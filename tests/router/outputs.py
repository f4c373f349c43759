"""What the fake workers say: the output of a request, by a script or a rule for each token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.errors import InvalidRequestError
from runtime.pb import common_pb2
from runtime.rpc.wire import finish_reason_to_proto
from runtime.sampling import SamplingParams, finish_reason_after

MAX_MODEL_LEN = 256

Script = Callable[[Sequence[int]], list[int]]
"""The output tokens for a prompt, endless enough or ending in a stop token."""
Choose = Callable[[Sequence[int], SamplingParams], int]
"""The token that follows a context: of it and the seed alone, as in the engine."""


def seeded_token(context: Sequence[int], sampling: SamplingParams) -> int:
    """One of the printable bytes' tokens, which depends on every token of the context."""
    text = f"{list(context)}, {sampling.seed}".encode()
    return 30 + hashlib.blake2b(text, digest_size=2).digest()[0] % 60


class TokenRule(Protocol):
    """What says which token comes; read anew for each one.

    Attributes:
        script: the whole output.
        choose: of one token, instead of the script.
    """

    script: Script
    choose: Choose | None


class Tokens:
    """The output of one request, from some token on."""

    def __init__(
        self, rule: TokenRule, context: list[int], num_output: int, sampling: SamplingParams
    ) -> None:
        """A context that nobody can have been given is an error: it would be wrong text."""
        self._rule = rule
        self._prompt = context[: len(context) - num_output]
        self._output: list[int] = []
        self._sampling = sampling
        if self.until(num_output) != context[len(self._prompt) :]:
            raise InvalidRequestError(f"the context {context} is not of our output")

    def at(self, index: int) -> int:
        return self.until(index + 1)[index]

    def until(self, end: int) -> list[int]:
        while len(self._output) < end:
            choose = self._rule.choose
            if choose is None:
                self._output = self._rule.script(self._prompt)
            else:
                self._output.append(choose([*self._prompt, *self._output], self._sampling))
        return self._output[:end]

    def finish_at(self, index: int) -> common_pb2.FinishReason:
        reason = finish_reason_after(
            self.at(index),
            num_output_tokens=index + 1,
            num_tokens=len(self._prompt) + index + 1,
            params=self._sampling,
            max_model_len=MAX_MODEL_LEN,
        )
        return finish_reason_to_proto(reason)
