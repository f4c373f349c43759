"""The rotary settings of a `config.json`, in each of the spellings that `transformers` reads.

`rope_scaling` counts if it says anything, else `rope_parameters`; the base stands in there or
beside it, and YaRN's trained context beside it counts before the one in there. After
`modeling_rope_utils.py` of transformers 5 (`convert_rope_params_to_dict`, `standardize_rope_params`
and `_compute_yarn_parameters`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
    with naming(_YARN.kind):
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
    name, kind = _kind(rope)
    if kind not in ("default", scaling.kind):
        problem = f"the rope_type {kind!r} is not implemented"
        raise ConfigError(rope.path(name), kind, problem, scaling.fix)
    for name in rope:
        if name not in _OF_ALL | scaling.settings:
            problem = f"no setting of rope_type {kind!r} that this server knows"
            fix = "remove it, if the model's own code does not read it"
            raise rope.refuse(name, problem, fix)
    for place in (fields, rope):
        if place.optional_number(_PARTIAL) not in (None, 1.0):
            raise place.refuse(_PARTIAL, *scaling.no_partial)
    theta = (rope if "rope_theta" in rope else fields).number("rope_theta", DEFAULT_THETA)
    if kind == "default":
        return theta, None, [rope.path(name) for name in rope if name in scaling.settings]
    return theta, rope, []


@contextmanager
def naming(kind: str) -> Iterator[None]:
    """Let refusals within say which rope_type they are about."""
    try:
        yield
    except ConfigError as error:
        problem = f"{error.problem} (of rope_type {kind!r})"
        raise ConfigError(error.path, error.value, problem, error.fix) from error


def overruled_rope(fields: Fields) -> str:
    """Return the sentence about rotary settings that others overrule; empty if none differ."""
    rope, parameters = _section(fields), fields.section("rope_parameters")
    others = {fields.path("rope_theta"): (fields, "rope_theta")}
    others |= {parameters.path(name): (parameters, name) for name in parameters}
    differ = [
        path
        for path, (place, name) in others.items()
        if name in place and name in rope and place.get(name) != rope.get(name)
    ]
    if not differ:
        return ""
    told = ", ".join(differ)
    return f"config.json says {told} otherwise than {rope.path('')[:-1]}, which counts"


def _section(fields: Fields) -> Fields:
    """Return the object that counts: `rope_scaling` if it says anything, else `rope_parameters`."""
    scaling, parameters = fields.section("rope_scaling"), fields.section("rope_parameters")
    return scaling or parameters


def _kind(rope: Fields) -> tuple[str, object]:
    """Return which field says what the settings are of, and what; "default" if none does."""
    name = "type" if "type" in rope and "rope_type" not in rope else "rope_type"
    return name, rope.get(name) if name in rope else "default"


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
