"""The `quantization_config` of a `config.json`: block FP8, or nothing.

After `FineGrainedFP8Config` of transformers 5, by whose rules the modules are named that a
checkpoint leaves unquantised.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from engine.hf_config.fields import Fields

SECTION: Final = "quantization_config"
UNQUANTIZED: Final = "modules_to_not_convert"

_ALIAS: Final = "ignored_layers"
_BLOCK: Final = "weight_block_size"
_DEFAULT_BLOCK: Final = (128, 128)
_SERVED: Final[Mapping[str, tuple[object, ...]]] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic", "DYNAMIC"),
    "fmt": ("e4m3", None),
    # Both are numbers as they are stored; activations get float32 scales either way.
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    "dequantize": (False,),
    "modules_to_convert": (None, []),
}
"""What each setting may say; the first is what its absence means."""


class ModulePatterns:
    """Names of modules, as `modules_to_not_convert` spells them.

    A pattern is a name up to a dot or the end, with regular expressions' `.` and `*`, or the end of
    a name.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        """Take the patterns; ValueError for one that cannot be read."""
        self._ends = tuple(patterns)
        for pattern in self._ends:
            if not pattern or set(pattern) & set("(\\"):
                raise ValueError(f"{pattern!r} is no name of modules")
        try:
            # A name matches up to a border: "mlp.gate" is not "mlp.gate_proj".
            starts = "|".join(self._ends)
            self._starts = re.compile(rf"(?:{starts})(?:(?<=\.)|(?=\.|$))")
        except (re.error, OverflowError) as error:
            raise ValueError(f"no names of modules: {error}") from error

    def __bool__(self) -> bool:
        return bool(self._ends)

    def match(self, name: str) -> bool:
        """Return whether a module is named."""
        if not self._ends:
            return False
        return self._starts.match(name) is not None or name.endswith(self._ends)


def read_quantization(fields: Fields) -> tuple[int, tuple[str, ...], list[str]]:
    """Read how weights are stored.

    Args:
        fields: of the whole `config.json`.

    Returns:
        The edge of a block of scales (0 for an unquantised checkpoint), the patterns of modules
        that are not quantised, and the paths of settings that nobody knows.

    Raises:
        ConfigError: another format, by setting.
    """
    section = fields.section(SECTION)
    if not section:
        return 0, (), []
    known = {*_SERVED, _BLOCK, UNQUANTIZED, _ALIAS}
    for name, values in _SERVED.items():
        value = section.get(name) if name in section else values[0]
        is_missing = name == "quant_method" and name not in section
        if is_missing or value not in values:
            fix = f"a checkpoint with {name} = {values[0]!r}"
            raise section.refuse(name, "only block-wise FP8 is implemented", fix)
    unquantized = UNQUANTIZED if section.get(UNQUANTIZED) is not None else _ALIAS
    patterns = section.names(unquantized)
    try:
        ModulePatterns(patterns)
    except ValueError as error:
        fix = "names of modules, such as 'lm_head' or 'model.layers.0.self_attn.kv_b_proj'"
        raise section.refuse(unquantized, str(error), fix) from error
    return _block_size(section), patterns, [section.path(n) for n in section if n not in known]


def _block_size(section: Fields) -> int:
    block = section.get(_BLOCK) if _BLOCK in section else list(_DEFAULT_BLOCK)
    edges = block if isinstance(block, list) and len(block) == 2 else [0, 0]
    if edges[0] == edges[1] and type(edges[0]) is int and edges[0] > 0:
        return edges[0]
    raise section.refuse(_BLOCK, "only square blocks are implemented", "[128, 128]")
