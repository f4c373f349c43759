"""The rotary settings of a `config.json`, in each of the spellings that `transformers` reads.

`rope_scaling` counts if it says anything, else `rope_parameters`; the base stands in there or
beside it, and YaRN's trained context beside it counts before the one in there. After
`modeling_rope_utils.py` of transformers 5 (`convert_rope_params_to_dict`, `standardize_rope_params`
and `_compute_yarn_parameters`).
"""

from dataclasses import dataclass
from typing import Final

from engine.hf_config.fields import Fields
from engine.yarn import YarnConfig
from runtime.errors import ConfigError

DEFAULT_THETA: Final = 10000.0

_TRAINED: Final = "original_max_position_embeddings"
_PARTIAL: Final = "partial_rotary_factor"
_OF_ALL: Final = frozenset({"rope_type", "type", "rope_theta", _PARTIAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How an architecture's positions may be scaled.

    Attributes:
        kind: as `rope_type` names it.
        settings: that it is made of.
        fix: for another kind.
        no_partial: problem and fix, for rotating a part of the numbers.
    """

    kind: str
    settings: frozenset[str]
    fix: str
    no_partial: tuple[str, str]


_YARN: Final = RopeScaling(
    kind="yarn",
    settings=frozenset(
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
    ),
    fix="use 'yarn' or 'default'",
    no_partial=(
        "not implemented: all of qk_rope_head_dim is rotated",
        "leave it out, and say qk_rope_head_dim",
    ),
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
    theta, rope, idle = read_settings(fields, _YARN)
    if rope is None:
        return theta, None, idle
    return theta, _read_yarn(fields, rope, max_position_embeddings), idle


def read_settings(fields: Fields, scaling: RopeScaling) -> tuple[float, Fields | None, list[str]]:
    """Read what all architectures say alike, and whether positions are scaled.

    Args:
        fields: of the whole `config.json`.
        scaling: the only one that the architecture may name.

    Returns:
        rope_theta, the settings of the scaling if it is named, and the paths of those without
        effect.

    Raises:
        ConfigError: a setting that is malformed, unknown or not implemented.
    """
    rope = _section(fields)
    for name in rope:
        if name not in _OF_ALL | scaling.settings:
            fix = "remove it, if the model's own code does not read it"
            raise rope.refuse(name, "no rotary setting that this server knows", fix)
    for place in (fields, rope):
        if place.optional_number(_PARTIAL) not in (None, 1.0):
            raise place.refuse(_PARTIAL, *scaling.no_partial)
    theta = (rope if "rope_theta" in rope else fields).number("rope_theta", DEFAULT_THETA)
    kind = _kind(rope)
    if kind == "default":
        return theta, None, [rope.path(name) for name in rope if name in scaling.settings]
    if kind != scaling.kind:
        name = "rope_type" if "rope_type" in rope else "type"
        raise ConfigError(rope.path(name), kind, "not implemented", scaling.fix)
    return theta, rope, []


def _section(fields: Fields) -> Fields:
    """Return the object that counts: `rope_scaling` if it says anything, else `rope_parameters`."""
    scaling, parameters = fields.section("rope_scaling"), fields.section("rope_parameters")
    return scaling or parameters


def _kind(rope: Fields) -> object:
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
