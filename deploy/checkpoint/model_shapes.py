"""Models by name, from what their config.json says: a cluster is planned before weights are there.

The numbers ship with this package (``models/shapes.toml``). They are read as a folder's config.json
is, so a model that is not served is refused here as well, once its numbers have been looked at.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deploy
from engine.model.registry import find_spec
from engine.model.spec import CommonConfig
from runtime.config import ClusterConfig
from runtime.errors import ConfigError

_FILE = Path(deploy.__file__).resolve().parent / "models" / "shapes.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What is known of a model.

    Attributes:
        name: by which it was asked for.
        model: what its config.json says; where that is not served, with what of it is.
        refusal: what is not; None where all is.
    """

    name: str
    model: CommonConfig
    refusal: ConfigError | None


def shape_names() -> tuple[str, ...]:
    """The models whose numbers ship."""
    return tuple(_tables())


def read_model_shape(name: str) -> ModelShape:
    """Return the shape of that name.

    Raises:
        ConfigError: there is none; with the one that was meant.
    """
    content = content_of(name)
    spec = find_spec(content)
    try:
        return ModelShape(name=name, model=spec.read(content), refusal=None)
    except ConfigError as refusal:
        if refusal.path != "model_type":
            raise
        # Another name for what may be the same graph: its numbers say what it takes all the same.
        model = spec.read({**content, "model_type": spec.model_type})
        return ModelShape(name=name, model=model, refusal=refusal)


def content_of(name: str) -> dict[str, Any]:
    """What its config.json says.

    Raises:
        ConfigError: as `read_model_shape`.
    """
    tables = _tables()
    known = name.lower()
    if known not in tables:
        close = difflib.get_close_matches(known.rpartition("/")[2], tables, n=1)
        fix = f"did you mean {close[0]}?" if close else f"one of {', '.join(tables)}"
        raise ConfigError("--model-shape", name, "is no model whose numbers ship", fix)
    own = dict(tables[known])
    base = content_of(own.pop("like")) if "like" in own else {}
    return {**base, **own}


def with_shape(config: ClusterConfig, shape: ModelShape) -> ClusterConfig:
    """``config`` for that model, of which no file is read."""
    name = config.model.name or Path(config.model.path).name or shape.name
    return replace(config, model=replace(config.model, path="", name=name, load_format="dummy"))


@functools.cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
