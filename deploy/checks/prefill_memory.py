"""Whether the weights of a prefill rank fit on its GPU, beside the KV of one request.

A bound from below: experts are counted by the rank's slots, everything else as if it were shared
out evenly, and what steps need is not counted. So whatever is refused here cannot start; what is
left of the GPU a rank measures itself (``engine.boot.kv_size``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deploy.checks.decode_budget import ALLOCATOR_SLACK, CONTEXT_BYTES, weights_per_rank
from deploy.checks.decode_memory import latent_bytes
from engine.config import DeepseekV3Config
from engine.model.spec import CommonConfig
from runtime.config import ClusterConfig, PrefillSection
from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBudget:
    """At least what a rank holds.

    Attributes:
        weights: bytes.
        num_local_experts: slots of the rank; with experts in slices all of them.
    """

    weights: int
    num_local_experts: int


def plan_prefill_memory(config: ClusterConfig, model: CommonConfig) -> PrefillBudget | None:
    """Return what a prefill rank holds; None on a CPU, or where the model has no experts.

    Args:
        config: of the cluster; what its GPUs have is ``decode.device_memory_gib``, if anything.
        model: that it serves, with weights in FP8.

    Raises:
        ConfigError: the weights, or a request beside them, do not fit; with what does.
    """
    prefill, experts = config.prefill, model.experts
    if prefill.device != "cuda" or experts is None:
        return None
    budget = _budget(config, experts)
    gib = config.decode.device_memory_gib
    if not gib:
        return budget
    length = config.model.max_model_len or model.max_position_embeddings
    room = _room(config, budget)
    if room <= 0:
        problem = (
            f"weights of at least {budget.weights / 1e9:.1f} GB a rank do not fit in a GPU of "
            f"{gib:g} GiB"
        )
        raise ConfigError(prefill.ranks_field, prefill.num_ranks, problem, _more(config, experts))
    layers = experts.num_kv_layers(with_mtp=_has_drafts(config))
    most = room // (layers * latent_bytes(config, model))
    asked, fitting = prefill.sizes.num_blocks, most // prefill.block_size
    if length <= most < asked * prefill.block_size:
        problem = (
            f"at most {fitting} fit in a GPU of {gib:g} GiB beside {budget.weights / 1e9:.1f} GB "
            "of weights"
        )
        raise ConfigError("prefill.num_blocks", asked, problem, '"auto" (as many as fit)')
    if most < length:
        problem = (
            f"beside {budget.weights / 1e9:.1f} GB of weights a rank with a GPU of {gib:g} GiB "
            f"has room for a request of {most} tokens, and one may have {length}"
        )
        fix = f"{_more(config, experts)}, or model.max_model_len of {most} or less"
        raise ConfigError(prefill.ranks_field, prefill.num_ranks, problem, fix)
    return budget


def describe_prefill_memory(budget: PrefillBudget) -> str:
    """One line."""
    return (
        f"prefill rank {budget.num_local_experts} experts, at least {budget.weights / 1e9:.1f} GB "
        "of weights"
    )


def _budget(config: ClusterConfig, model: DeepseekV3Config) -> PrefillBudget:
    prefill = config.prefill
    num_slots = model.n_routed_experts + prefill.num_redundant_experts
    num_local = num_slots // prefill.num_ranks if prefill.expert_parallel else num_slots
    whole = weights_per_rank(model, num_local_experts=num_local, with_mtp=_has_drafts(config))
    # The absorbed form's copy of the up-projection is decode's.
    others = whole.total - whole.routed_experts - whole.up_projection
    experts = whole.routed_experts // (1 if prefill.expert_parallel else prefill.tp)
    return PrefillBudget(weights=experts + others // prefill.tp, num_local_experts=num_local)


def _has_drafts(config: ClusterConfig) -> bool:
    return config.decode.num_speculative_tokens != 0


def _room(config: ClusterConfig, budget: PrefillBudget) -> int:
    """Bytes that may be left for KV."""
    share = 1.0 if config.prefill.sizes.num_blocks else config.prefill.gpu_memory_fraction
    device = config.decode.device_memory_gib * 2**30
    return int((share - ALLOCATOR_SLACK) * device) - CONTEXT_BYTES - budget.weights


def _more(config: ClusterConfig, model: DeepseekV3Config) -> str:
    """From how many ranks on the weights fit."""
    prefill = config.prefill
    num_slots = model.n_routed_experts + prefill.num_redundant_experts
    for ranks in range(prefill.num_ranks + 1, num_slots + 1):
        if num_slots % ranks or (prefill.tp > 1 and model.num_attention_heads % ranks):
            continue
        more = _with_ranks(prefill, ranks)
        section = replace(config, prefill=more)
        if _room(section, _budget(section, model)) > 0:
            return f"{ranks} or more ranks"
    return "GPUs with more memory"


def _with_ranks(prefill: PrefillSection, ranks: int) -> PrefillSection:
    return replace(prefill, dp=ranks) if prefill.dp > 1 else replace(prefill, tp=ranks)
