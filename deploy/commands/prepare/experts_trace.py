"""A trace of experts' load, printed for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experts.trace import ExpertTrace


def print_trace(trace: ExpertTrace) -> None:
    """Print what a trace is of, for people."""
    print(f"model        {trace.model_name}, {trace.role}")
    groups = f", in {trace.topk_group} of {trace.num_groups} groups" if trace.num_groups > 1 else ""
    shape = f"{trace.num_layers} layers of {trace.num_experts} experts"
    print(f"experts      {shape}, {trace.top_k} a token{groups}")
    passes = trace.num_rows * trace.passes_per_row
    print(f"recorded     {passes:,} passes of {trace.tokens_per_pass:,.0f} tokens", end="")
    print(f" on {trace.num_ranks} ranks of {trace.num_hosts} hosts")
