"""Which architectures are served is said in one place, and everything else is refused by name."""

from pathlib import Path

import pytest

from engine.boot.build import build_model
from engine.config import DeepseekV3Config
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.model.registry import MODEL_SPECS, find_spec, read_config, spec_of
from engine.model.spec import ModelSpec
from runtime.errors import ConfigError
from tests.engine.tiny import tiny_config, write_checkpoint


def test_each_is_found_by_its_architecture_or_its_type() -> None:
    for name, spec in MODEL_SPECS.items():
        assert spec.architecture == name
        assert find_spec({"architectures": [name]}) is spec
        assert find_spec({"model_type": spec.model_type}) is spec
        assert find_spec({"architectures": [], "model_type": spec.model_type}) is spec


def test_a_folder_is_read_by_the_spec_that_it_names(tmp_path: Path) -> None:
    config = read_config(write_checkpoint(tmp_path))
    assert config == DeepseekV3Config.from_hf(tiny_config())
    assert spec_of(config) is MODEL_SPECS["DeepseekV3ForCausalLM"]
    assert isinstance(build_model(tmp_path), DeepseekV3ForCausalLM)


@pytest.mark.parametrize(
    ("content", "field", "value"),
    [
        ({"architectures": ["Mamba2ForCausalLM"]}, "architectures", "Mamba2ForCausalLM"),
        ({"architectures": "Mamba2ForCausalLM"}, "architectures", "Mamba2ForCausalLM"),
        ({"architectures": [["odd"]]}, "architectures", ["odd"]),
        ({"model_type": "mamba2"}, "model_type", "mamba2"),
        ({}, "model_type", None),
    ],
)
def test_anything_else_is_refused_with_what_is_served(
    content: dict[str, object], field: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_spec(content)
    assert (caught.value.path, caught.value.value) == (field, value)
    for spec in MODEL_SPECS.values():
        assert (spec.architecture if field == "architectures" else spec.model_type) in (
            caught.value.fix
        )


def test_a_device_without_its_attention_is_refused_by_name() -> None:
    def never(*_: object) -> object:
        raise AssertionError

    spec = ModelSpec(
        architecture="SmallForCausalLM",
        model_type="small",
        read=never,  # type: ignore[arg-type]
        build=never,  # type: ignore[arg-type]
        lacks_on_cuda="attention to pages",
    )
    spec.check_device("decode.device", "cpu")
    with pytest.raises(ConfigError, match="SmallForCausalLM has no attention to pages") as caught:
        spec.check_device("decode.device", "cuda")
    assert (caught.value.path, caught.value.value) == ("decode.device", "cuda")
