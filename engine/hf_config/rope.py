"""The rotary settings of a `config.json`, in each of the spellings that `transformers` reads.

`rope_scaling` counts if it says anything, else `rope_parameters`; the base stands in there or
beside it, and YaRN's trained context beside it counts before the one in there. After
`modeling_rope_utils.py` of transformers 5 (`convert_rope_params_to_dict`, `standardize_rope_params`
and `_compute_yarn_parameters`).
"""

from typing import Final

from engine.hf_config.fields import Fields
from engine.yarn import YarnConfig
from runtime.errors import ConfigError

DEFAULT_THETA: Final = 10000.0

_TRAINED: Final = "original_max_position_embeddings"
_PARTIAL: Final = "partial_rotary_factor"
_OF_ALL: Final = frozenset({"rope_type", "type", "rope_theta", _PARTIAL})
_OF_YARN: Final = frozenset(
    {
        "factor",
        _TRAINED,
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    }
)


def read_rope(
    fields: Fields, max_position_embeddings: int
) -> tuple[float, YarnConfig | None, list[str]]:
    """Read base and extension.

    Args:
        fields: of the whole `config.json`.
        max_position_embeddings: the trained context, if YaRN does not say it.

    Returns:
        rope_theta, YaRN if the model has it, and the paths of settings without effect.

    Raises:
        ConfigError: a setting that is malformed, unknown or not implemented.
    """
    rope = rope_section(fields)
    for name in rope:
        if name not in _OF_ALL | _OF_YARN:
            fix = "remove it, if the model's own code does not read it"
            raise rope.refuse(name, "no rotary setting that this server knows", fix)
    for place in (fields, rope):
        if place.optional_number(_PARTIAL) not in (None, 1.0):
            problem = "not implemented: all of qk_rope_head_dim is rotated"
            raise place.refuse(_PARTIAL, problem, "leave it out, and say qk_rope_head_dim")
    theta = (rope if "rope_theta" in rope else fields).number("rope_theta", DEFAULT_THETA)
    match rope_kind(rope):
        case "default":
            return theta, None, [rope.path(name) for name in rope if name in _OF_YARN]
        case "yarn":
            return theta, _read_yarn(fields, rope, max_position_embeddings), []
        case kind:
            name = "rope_type" if "rope_type" in rope else "type"
            raise ConfigError(rope.path(name), kind, "not implemented", "use 'yarn' or 'default'")


def rope_section(fields: Fields) -> Fields:
    """Return the object that counts: `rope_scaling` if it says anything, else `rope_parameters`."""
    scaling, parameters = fields.section("rope_scaling"), fields.section("rope_parameters")
    return scaling or parameters


def rope_kind(rope: Fields) -> object:
    """Return what the settings call themselves; "default" if nothing."""
    for name in ("rope_type", "type"):
        if name in rope:
            return rope.get(name)
    return "default"


def _read_yarn(fields: Fields, rope: Fields, max_position_embeddings: int) -> YarnConfig:
    if _TRAINED in fields:
        trained = fields.integer(_TRAINED)
    else:
        trained = rope.integer(_TRAINED, max_position_embeddings)
    return YarnConfig(
        factor=rope.number("factor"),
        original_max_position_embeddings=trained,
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        mscale=rope.optional_number("mscale") or 0.0,
        mscale_all_dim=rope.optional_number("mscale_all_dim") or 0.0,
        attention_factor=rope.optional_number("attention_factor"),
        truncate=rope.flag("truncate", True, null=False),
    )
