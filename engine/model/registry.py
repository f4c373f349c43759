"""The architectures that are served: the one place that names them all.

A new one is a `ModelSpec` in a file of its own and a line here (docs/adr/0016-models.md).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from engine.hf_config.content import read_content
from engine.model.deepseek_v3_spec import DEEPSEEK_V3
from engine.model.llama_spec import LLAMA
from engine.model.spec import CommonConfig, ModelSpec
from runtime.errors import ConfigError

MODEL_SPECS: Final[Mapping[str, ModelSpec]] = {
    spec.architecture: spec for spec in (DEEPSEEK_V3, LLAMA)
}
"""By architecture."""


def read_config(path: str | Path) -> CommonConfig:
    """Read `config.json` of a checkpoint folder.

    Raises:
        ConfigError: no such file, not JSON, an unknown architecture, or an unsupported value.
    """
    content = read_content(path)
    return find_spec(content).read(content)


def spec_of(config: CommonConfig) -> ModelSpec:
    """Return the spec that has read a configuration."""
    return MODEL_SPECS[config.architecture]


def find_spec(content: Mapping[str, object]) -> ModelSpec:
    """Return the spec for the content of a `config.json`.

    `architectures` decides, or `model_type` where there is none.

    Raises:
        ConfigError: nothing that is served; with what is.
    """
    named, model_type = content.get("architectures"), content.get("model_type")
    if named:
        names = named if isinstance(named, list) else [named]
        if len(names) == 1 and isinstance(names[0], str) and names[0] in MODEL_SPECS:
            return MODEL_SPECS[names[0]]
        fix = f"use a checkpoint of {' or '.join(MODEL_SPECS)}"
        first = names[0] if len(names) == 1 else named
        raise ConfigError("architectures", first, "not an architecture that is served", fix)
    for spec in MODEL_SPECS.values():
        if spec.model_type == model_type:
            return spec
    types = " or ".join(spec.model_type for spec in MODEL_SPECS.values())
    problem = "not a model type that is served"
    raise ConfigError("model_type", model_type, problem, f"use a checkpoint of {types}")
