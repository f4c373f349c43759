"""Whether a checkpoint has its routed experts in FP8: all of them, or none.

Tokens travel to experts in the format that these multiply, and one dispatcher serves all layers; so
a checkpoint that quantises some experts only cannot be served as it is.
"""

from collections.abc import Iterator

from engine.config import DeepseekV3Config
from engine.hf_config.quantization import SECTION, UNQUANTIZED, ModulePatterns
from runtime.errors import ConfigError


def expert_modules(path: str, num_experts: int) -> Iterator[str]:
    """Yield the names under which a checkpoint may say that experts are not quantised.

    Args:
        path: of the experts of a layer, a module by itself in transformers.
        num_experts: of the layer.
    """
    yield path
    for expert in range(num_experts):
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{path}.{expert}.{name}"


def experts_are_quantized(config: DeepseekV3Config, *, with_mtp: bool = False) -> bool:
    """Return whether the routed experts of all layers are in FP8.

    Args:
        config: of the model.
        with_mtp: count its layers for multi-token prediction.

    Raises:
        ConfigError: some are, and some are not.
    """
    patterns = ModulePatterns(config.unquantized_modules)
    if not config.fp8_block_size or not patterns:
        return config.fp8_block_size > 0
    are_named: dict[bool, str] = {}
    for layer in range(config.first_k_dense_replace, config.num_kv_layers(with_mtp=with_mtp)):
        layer_path = f"model.layers.{layer}.mlp.experts"
        path, *experts = expert_modules(layer_path, config.n_routed_experts)
        if patterns.match(path):
            are_named.setdefault(True, path)
            continue
        for expert in experts:
            are_named.setdefault(patterns.match(expert), expert)
    if len(are_named) == 2:
        raise ConfigError(
            f"{SECTION}.{UNQUANTIZED}",
            list(config.unquantized_modules),
            f"names {are_named[True]} and not {are_named[False]}: routed experts are served in one "
            "format",
            "a checkpoint that quantises all routed experts, or none",
        )
    return True not in are_named
