"""DeepSeek-V3 as an entry of the registry."""

from typing import Final

from engine.config import ARCHITECTURE, MODEL_TYPE, DeepseekV3Config
from engine.model.spec import BuildOptions, CommonConfig, ModelSpec, ServedModel


def _build(config: CommonConfig, options: BuildOptions) -> ServedModel:
    from engine.model.deepseek_v3 import DeepseekV3ForCausalLM

    assert isinstance(config, DeepseekV3Config)
    return DeepseekV3ForCausalLM(
        config,
        options.groups,
        dtype=options.dtype,
        device=options.device,
        with_mtp=options.with_mtp,
        placements=options.placements,
        kernels=options.kernels,
        execution=options.execution,
    )


DEEPSEEK_V3: Final = ModelSpec(
    architecture=ARCHITECTURE,
    model_type=MODEL_TYPE,
    read=DeepseekV3Config.from_hf,
    build=_build,
)
