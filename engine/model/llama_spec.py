"""Llama as an entry of the registry."""

from typing import Final

from engine.model.llama_config import ARCHITECTURE, MODEL_TYPE, LlamaConfig
from engine.model.spec import BuildOptions, CommonConfig, ModelSpec, ServedModel


def _build(config: CommonConfig, options: BuildOptions) -> ServedModel:
    from engine.model.llama import LlamaForCausalLM

    assert isinstance(config, LlamaConfig)
    return LlamaForCausalLM(config, options)


LLAMA: Final = ModelSpec(
    architecture=ARCHITECTURE,
    model_type=MODEL_TYPE,
    read=LlamaConfig.from_hf,
    build=_build,
    lacks_on_cuda="attention for GPUs (paged, with grouped keys and values)",
)
