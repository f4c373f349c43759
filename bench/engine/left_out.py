"""What a figure leaves out, said in full: of every measurement of an engine, and of a proxy.

A proxy of N ranks on n GPUs does a rank's work, and not all of what N ranks do to one another. Each
difference is a sentence of its report, with its numbers, because none of them can be taken out of
the figure afterwards.
"""

from __future__ import annotations

from math import comb

from bench.engine.options import Axis, Setup
from bench.engine.shapes import MeasuredModel
from engine.config import DeepseekV3Config

_ALWAYS = {
    "prefill": (
        "not in it: queues, the scheduler, claims of tickets, the push of KV to decode",
        "prompts are of one length and in one piece: no chunks, no prefix but --cached-len",
    ),
    "decode": (
        "not in it: places, arriving KV, admission, preemption, frames to routers",
        "contexts are invented numbers of the pool; a request that ends is followed at once",
    ),
}


def left_out(measured: MeasuredModel, setup: Setup, role: str) -> list[str]:
    """Sentences about a figure of a role's ranks, "prefill" or "decode"."""
    told = [*_ALWAYS[role]]
    if not setup.expert_load:
        told.append("gates do not count tokens by expert, as a worker's do")
    if setup.device == "cpu":
        told.append("a CPU runs the path of a GPU by plain operations: its times say nothing")
    if measured.virtual_gpus > measured.num_gpus:
        told += _of_proxy(measured, setup, role)
    return told


def expected_ranks(config: DeepseekV3Config, num_ranks: int) -> float:
    """Ranks that hold one of a token's experts in the mean, its own counted, by uniform routing.

    A rank holds whole groups of experts. It is missed with the probability, over the number of its
    groups among the chosen ones, that all K experts lie in the others (hypergeometric twice).
    """
    groups, kept, top_k = config.n_group, config.topk_group, config.num_experts_per_tok
    size, own = config.n_routed_experts // groups, groups // num_ranks
    missed = sum(
        comb(own, hit)
        * comb(groups - own, kept - hit)
        / comb(groups, kept)
        * comb((kept - hit) * size, top_k)
        / comb(kept * size, top_k)
        for hit in range(min(own, kept) + 1)
    )
    return num_ranks * (1.0 - missed)


def _of_proxy(measured: MeasuredModel, setup: Setup, role: str) -> list[str]:
    config, whole = measured.config, measured.whole
    here, there = measured.num_gpus, measured.virtual_gpus
    told = [
        f"a proxy: each rank holds what one of {there} holds, {_heads(config, setup)} of the"
        f" {whole.num_attention_heads} heads and {config.n_routed_experts // here} of the"
        f" {whole.n_routed_experts} experts, with as many rows an expert in the mean",
        f"of what a rank needs {(here - 1) / here:.3f} comes from others, with {there} ranks it"
        f" would be {(there - 1) / there:.3f}",
    ]
    if here == 1:
        told.append("a rank alone waits for nobody, and nothing travels")
        if setup.played_ranks and role == "decode":
            told.append(
                "its experts get the rows of its own tokens instead of others': the same number at"
                " every step, so no rank is ever fuller than another"
            )
    else:
        told.append(
            f"each layer waits for the slowest of {here} ranks instead of {there}, and each step"
            f" begins when {here} have met"
        )
    if setup.plays:
        return told + _of_played(measured)
    sharing = _of_own_tokens if setup.shard_axis is Axis.DP else _of_shared_tokens
    return told + sharing(measured, role)


def _heads(config: DeepseekV3Config, setup: Setup) -> int:
    return config.num_attention_heads // setup.tp


def _of_own_tokens(measured: MeasuredModel, role: str) -> list[str]:
    config, whole = measured.config, measured.whole
    here, there = measured.num_gpus, measured.virtual_gpus
    told = []
    if here > 1:
        sent = expected_ranks(config, here) * (here - 1) / here
        whole_sent = expected_ranks(whole, there) * (there - 1) / there
        told.append(
            f"a token travels to {sent:.2f} other ranks in the mean (uniform routing), with {there}"
            f" ranks to {whole_sent:.2f}"
        )
    if here > 1 and role == "decode":
        told.append(
            "tables and loops of the exchange, and the room of its receivers, are for the tokens of"
            f" {here} ranks instead of {there}"
        )
    groups = (
        " and leaves the choice of groups out"
        if config.topk_group == config.n_group and whole.topk_group < whole.n_group
        else ""
    )
    told.append(
        f"the router scores {config.n_routed_experts} experts instead of"
        f" {whole.n_routed_experts}{groups}"
    )
    spread = (1 - _share(config)) / (1 - _share(whole))
    told.append(
        f"the number of an expert's rows has {spread:.2f} of the variance that uniform routing over"
        f" all {whole.n_routed_experts} experts gives"
    )
    return told


def _of_played(measured: MeasuredModel) -> list[str]:
    config, whole = measured.config, measured.whole
    here, there = measured.num_gpus, measured.virtual_gpus
    return [
        f"in every layer rank 0 gets the rows of the busiest of {there} ranks in the mean pass, and"
        f" the others those of {here - 1} further ones, scaled so that a token has"
        f" {config.num_experts_per_tok} experts: a pass in which another rank is fuller by chance"
        " is not played",
        "one GPU has the busiest rank of all layers, and its heat, where layers differ in it",
        f"a token chooses among {config.n_routed_experts} experts without groups; to how many ranks"
        f" it travels here and with {there} ranks is in `played`, with the time that is missing by"
        " the planner's model: where experts stand torn apart more of it is",
        f"the router scores {config.n_routed_experts} experts instead of {whole.n_routed_experts}",
        "an expert with two slots here stands for two of the larger group: `experts` takes them for"
        " one, rows of ranks are in `played`",
    ]


def _share(config: DeepseekV3Config) -> float:
    """Of the experts, those of a token."""
    return config.num_experts_per_tok / config.n_routed_experts


def _of_shared_tokens(measured: MeasuredModel, role: str) -> list[str]:
    config, whole = measured.config, measured.whole
    here, there = measured.num_gpus, measured.virtual_gpus
    return [
        f"a token chooses {config.num_experts_per_tok} of {config.n_routed_experts} experts instead"
        f" of {whole.num_experts_per_tok} of {whole.n_routed_experts}",
        f"work on a rank's own rows (norms, router, shared expert, projections to latents) is for"
        f" 1/{here} of the tokens instead of 1/{there}",
        f"gathers and sums are over {here} ranks instead of {there}",
    ]
