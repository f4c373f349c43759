"""What steps of prefill and decode take, in seconds: lines through what GPUs were recorded to do.

Simulations read them here, so that they speak of the same machines. Real requests share a step of
prefill; a simulation that computes one prompt after the other must not let each of them pay for a
whole step, so it has a line of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of DeepSeek-V3 shapes on a node of eight H200: a constant, and what each item adds."""

    prefill_step_s: float
    prefill_token_s: float
    decode_step_s: float
    decode_request_s: float

    def prefill_s(self, num_tokens: int) -> float:
        """A step with so many new tokens."""
        return self.prefill_step_s + num_tokens * self.prefill_token_s

    def decode_s(self, num_requests: int) -> float:
        """A step with so many requests on each rank."""
        return self.decode_step_s + num_requests * self.decode_request_s


H200_STEPS = StepTimes(
    prefill_step_s=0.0393,
    prefill_token_s=18.5e-6,
    decode_step_s=0.0249,
    decode_request_s=0.000128,
)
"""Tensor-parallel prefill: 115 ms for 4,096 tokens, 342 ms for 16,384. Decode: 33.1 ms for 64
requests a rank, 41.3 ms for 128. Both from bench/results/2026-11-23-two-gpus-2xh200.md."""
H200_PROMPTS = StepTimes(
    prefill_step_s=0.008, prefill_token_s=1 / 53_700, decode_step_s=0.042, decode_request_s=0.0
)
"""Of one prompt after the other, and of full decode ranks. Prefill with scattered rows, 53,700
tokens a second (bench/results/2026-11-21-prefill-decode-4xh200.md), and 8 ms a prompt for launches
and sampling, which is an estimate; decode at 128 requests a rank, whatever their number."""
