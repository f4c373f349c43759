"""Sizes of the pair, and what things take, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from bench.step_times import H200_STEPS, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class PairShape:
    """A prefill node of eight H200 (shared heads) and ranks of a decode node of eight."""

    num_ranks: int = 2
    """Of decode."""
    max_num_seqs: int = 128
    max_num_reserved: int = 512
    """Requests that a decode rank takes on: four times what it runs, as by default."""
    decode_blocks: int = 6000
    host_blocks: int = 6000
    prefill_seqs: int = 16
    batch_tokens: int = 8192
    prefill_blocks: int = 4000
    block_size: int = 64
    steps: StepTimes = H200_STEPS
    transfer_s: float = 0.010
    network_s: float = 0.002

    def capacity(self, mean_prompt: float, mean_output: float) -> float:
        """Requests per second that neither side can do more of."""
        prefill = self.batch_tokens / self.steps.prefill_s(self.batch_tokens) / mean_prompt
        token_s = self.steps.decode_s(self.max_num_seqs)
        decode = self.num_ranks * self.max_num_seqs / token_s / mean_output
        return min(prefill, decode)
