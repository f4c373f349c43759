"""Tensors that published checkpoints carry beside the weights, and that no model here reads.

They repeat what is computed here, or belong to ways of serving that are not those of this server.
Each kind is known by its name; whatever else the model has no parameter for is an error, because a
weight that nobody reads makes another model.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import torch

from engine.model.spec import CommonConfig
from engine.weights.checkpoint import Checkpoint, CheckpointError

_KINDS: Final[Mapping[str, re.Pattern[str]]] = {
    "rotary_emb": re.compile(r"\.rotary_emb\.(?:inv_freq|cos_cached|sin_cached)$"),
    "scales of a KV cache": re.compile(
        r"\.(?:[kvq]_scale|kv_scale|prob_scale|[kv]_proj\.output_scale|[kv]_zero_point"
        r"|kv_cache_scaling_factor)$"
    ),
    "scales of activations": re.compile(
        r"\.(?:input|activation|output)_(?:scale|zero_point|amax|global_scale)$"
    ),
}
_OF_WEIGHT: Final = re.compile(r"(?P<weight>.*\.weight)_(?:scale|scale_inv|zero_point)$")
_OF_MTP: Final = re.compile(r"(?P<layer>model\.layers\.(?P<index>\d+)\.)eh_proj\.weight$")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROWS: Final = 4096
"""That are compared at a time."""


def known_by_name(names: Iterable[str]) -> Counter[str]:
    """Return how many tensors of each kind no model here reads, whatever is stored in them."""
    kinds = (_kind(name) for name in names)
    return Counter(kind for kind in kinds if kind)


def find_left_out(
    names: Iterable[str],
    checkpoint: Checkpoint,
    config: CommonConfig,
    unused: tuple[str, ...],
) -> dict[str, list[str]]:
    """Return those of the names that can be left out, by kind.

    Args:
        names: of tensors that the model has no parameter for.
        checkpoint: that holds them.
        config: of the model.
        unused: prefixes that the model leaves out on purpose.

    Raises:
        CheckpointError: a head that the configuration ties to an embedding that it differs from.
    """
    found: dict[str, list[str]] = {}
    drafts = _unnamed_drafts(checkpoint.names, config)
    for name in names:
        if name.startswith(unused) or name.startswith(drafts):
            kind = "layers that are not used"
        elif name == _HEAD and config.tie_word_embeddings:
            _check_tied(checkpoint)
            kind = "a head that equals the embedding"
        elif _is_scale_of_plain(name, checkpoint):
            kind = "scales of weights that are not quantised"
        else:
            kind = _kind(name)
        if kind:
            found.setdefault(kind, []).append(name)
    return found


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "")


def _unnamed_drafts(names: Collection[str], config: CommonConfig) -> tuple[str, ...]:
    """Return the prefixes of MTP layers of which the configuration says nothing."""
    first = config.num_hidden_layers + config.num_nextn_predict_layers
    layers = (_OF_MTP.match(name) for name in names)
    return tuple(found["layer"] for found in layers if found and int(found["index"]) >= first)


def _is_scale_of_plain(name: str, checkpoint: Checkpoint) -> bool:
    found = _OF_WEIGHT.match(name)
    return (
        found is not None and found["weight"] in checkpoint and checkpoint.is_plain(found["weight"])
    )


def _check_tied(checkpoint: Checkpoint) -> None:
    """Refuse a head beside the embedding that stands for it, unless both are the same numbers."""
    shape = checkpoint.shape_of(_HEAD)
    is_same = _EMBEDDING in checkpoint and checkpoint.shape_of(_EMBEDDING) == shape
    for start in range(0, shape[0] if is_same else 0, _ROWS):
        ranges = ((start, min(start + _ROWS, shape[0])), *((0, size) for size in shape[1:]))
        head, embedding = (checkpoint.read(name, ranges) for name in (_HEAD, _EMBEDDING))
        is_same = is_same and torch.equal(head, embedding)
    if not is_same:
        raise CheckpointError(
            f"differs from {_EMBEDDING}, which stands for it by tie_word_embeddings = true. Fix: "
            "say tie_word_embeddings = false in config.json, if the model has a head of its own",
            file=checkpoint.file_of(_HEAD),
            tensor=_HEAD,
        )
