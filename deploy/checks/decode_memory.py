"""Whether a decode rank fits on its GPU, and what of the GPU is left for KV.

Joins the configuration of a cluster with the arithmetic of ``deploy.checks.decode_budget``; nothing
is started, and no GPU is asked.
"""

from __future__ import annotations

from deploy.checks.decode_budget import DecodeBudget, DecodePlan, divide_memory
from engine.graphs.buckets import batch_buckets
from engine.model.spec import CommonConfig
from runtime.config import ClusterConfig, DecodeSection
from runtime.errors import ConfigError
from worker.engine_options import engine_options

_FIELDS = {
    "dp": "decode.dp",
    "ep": "decode.dp",
    "num_physical_experts": "decode.num_redundant_experts",
    "hidden_size": "model.path",
    "num_experts_per_tok": "model.path",
}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}


def plan_decode_memory(config: ClusterConfig, model: CommonConfig) -> DecodeBudget | None:
    """Divide the memory of a decode rank; None where ``decode.device_memory_gib`` is not given,
    or the model has no experts.

    Args:
        config: of the cluster.
        model: that it serves, with weights in FP8.

    Raises:
        ConfigError: a rank does not fit; with the field's path, and what fits.
    """
    decode = config.decode
    experts = model.experts
    if decode.device != "cuda" or not decode.device_memory_gib or experts is None:
        return None
    choices = engine_options(decode).draft_choices
    buckets = batch_buckets(decode.sizes.max_num_seqs)
    plan = DecodePlan(
        num_ranks=decode.dp,
        num_redundant_experts=decode.num_redundant_experts,
        max_tokens_per_rank=decode.tokens_per_rank,
        max_num_seqs=decode.sizes.max_num_seqs,
        num_speculative_tokens=choices.of(decode.sizes.max_num_seqs)[-1],
        is_adaptive=choices.are_open,
        by_nvlink=decode.dispatcher == "nvlink",
        block_size=decode.block_size,
        latent_bytes=latent_bytes(config, model),
        num_graphs=sum(len(choices.of(bucket)) for bucket in buckets),
        moves_experts=decode.rebalance_experts == "on",
        device_bytes=int(decode.device_memory_gib * decode_share(decode) * 2**30),
    )
    try:
        budget = divide_memory(experts, plan)
    except ConfigError as error:
        path = _FIELDS.get(error.path, f"decode.{error.path}")
        raise ConfigError(path, error.value, error.problem, error.fix) from error
    length = config.model.max_model_len or model.max_position_embeddings
    needed = 1 + -(-length // decode.block_size)
    asked = decode.sizes.num_blocks
    if not asked and budget.num_blocks < needed:
        raise ConfigError(
            "decode.num_blocks",
            decode.num_blocks,
            f"a request of {length} tokens needs {needed} blocks, and {budget.num_blocks} fit in "
            f"{decode.gpu_memory_fraction:g} of a GPU of {decode.device_memory_gib:g} GiB",
            "a smaller model.max_model_len, more ranks, or a larger decode.gpu_memory_fraction",
        )
    if asked > budget.num_blocks:
        raise ConfigError(
            "decode.num_blocks",
            asked,
            f"a GPU of {decode.device_memory_gib:g} GiB has room for {budget.num_blocks} beside "
            f"{budget.weights / 1e9:.1f} GB of weights",
            f'"auto" (as many as fit), {budget.num_blocks} or less, or more ranks',
        )
    return budget


def latent_bytes(config: ClusterConfig, model: CommonConfig) -> int:
    """Bytes of a token and layer in the KV pools of both roles."""
    asked = config.decode.kv_dtype
    return model.kv_spec.width * _ITEM_BYTES[config.compute_dtype if asked == "auto" else asked]


def decode_share(decode: DecodeSection) -> float:
    """What of a GPU is divided: all of it, or the share within which blocks are to be chosen."""
    return 1.0 if decode.sizes.num_blocks else decode.gpu_memory_fraction


def describe_decode_memory(budget: DecodeBudget) -> list[str]:
    """One line per part of the memory, the largest known parts first."""
    parts = {
        "weights": budget.weights,
        "KV": budget.kv,
        "transfer buffer": budget.transfer_buffer,
        "workspace": budget.workspace,
        "CUDA graphs": budget.graphs,
        "experts on the move": budget.moving,
        "CUDA and libraries": budget.context,
    }
    lines = [f"  {name:<19} {size / 1e9:7.2f} GB" for name, size in parts.items()]
    return [
        f"decode rank  {budget.num_local_experts} experts, at most {budget.num_blocks} KV blocks "
        f"in {budget.device / 1e9:.1f} GB:",
        *lines,
    ]
