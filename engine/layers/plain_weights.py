"""Which weights of a model are not in FP8 although their checkpoint may have them so.

They take twice the memory and are multiplied without FP8, which nobody may find out by a number
that is too low. One sentence for a whole model: layers that are alike are counted.
"""

import re
from collections import Counter

from engine.layers.matrix import Matrix
from engine.model.spec import ServedModel

_LAYER = re.compile(r"^model\.layers\.\d+\.")


def describe_plain_weights(model: ServedModel) -> str:
    """Say what is held in the compute dtype, how often, and why; empty if nothing is."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for name, module in model.named_modules():
        if isinstance(module, Matrix) and module.plain_because:
            kind = (_LAYER.sub("", name).removesuffix(".matrix"), module.plain_because)
            counts[kind] += 1
            first.setdefault(kind, name.removesuffix(".matrix"))
    return "; ".join(
        f"{first[kind]}{f' and {count - 1} alike' if count > 1 else ''} ({kind[1]})"
        for kind, count in counts.items()
    )
