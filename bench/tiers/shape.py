"""Sizes of the pair, and what things take, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PairShape:
    """A prefill node of eight H200 (shared heads) and ranks of a decode node of eight.

    Prefill: 115 ms for 4,096 tokens, 342 ms for 16,384. Decode: 33.1 ms for 64 requests a rank,
    41.3 ms for 128. Both from bench/results/2026-11-23-two-gpus-2xh200.md, as lines through them.
    """

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
    prefill_step_s: float = 0.0393
    prefill_token_s: float = 18.5e-6
    decode_step_s: float = 0.0249
    decode_request_s: float = 0.000128
    transfer_s: float = 0.010
    network_s: float = 0.002

    def capacity(self, mean_prompt: float, mean_output: float) -> float:
        """Requests per second that neither side can do more of."""
        step_s = self.prefill_step_s + self.batch_tokens * self.prefill_token_s
        prefill = self.batch_tokens / step_s / mean_prompt
        token_s = self.decode_step_s + self.max_num_seqs * self.decode_request_s
        decode = self.num_ranks * self.max_num_seqs / token_s / mean_output
        return min(prefill, decode)
