"""Where the model is that a configuration means: a folder, one of the hub, or the bundled one.

Apart from the checks of `deploy.checks.cluster`, because it loads nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import deploy
from deploy.errors import ClusterError
from engine.hf_config.content import read_content
from runtime.config import ClusterConfig, ModelSection
from runtime.errors import ConfigError
from runtime.hub_model import HubModel

BUNDLED_MODEL = Path(deploy.__file__).resolve().parent / "models" / "tandem-python"


def with_model(config: ClusterConfig, *, weights: bool = False) -> ClusterConfig:
    """``config`` with the model's folder and name; one of the hub is downloaded if need be.

    Without ``weights`` those of a model of the hub are left there: ``config`` is then to plan with,
    or for a router, and says "dummy".

    Raises:
        ConfigError: there is no checkpoint in the folder.
        ClusterError: the hub does not give it.
    """
    if config.model.path and (wanted := HubModel.meant_by(config.model.path)):
        return _with_hub_model(config, wanted, weights=weights)
    path = Path(config.model.path).expanduser() if config.model.path else BUNDLED_MODEL
    path = path.resolve()
    read_content(path)
    model = dataclasses.replace(config.model, path=str(path), name=config.model.name or path.name)
    return dataclasses.replace(config, model=model)


def _with_hub_model(config: ClusterConfig, wanted: HubModel, *, weights: bool) -> ClusterConfig:
    # Imported late: few configurations name one.
    from deploy.checkpoint.download import download
    from deploy.checkpoint.hub import HubError

    if weights and config.cluster.spans_hosts:
        problem = "every host of a Ray cluster reads the model from a folder of its own"
        fix = f"a folder of each, or one for all: `tandem download {wanted} --to DIR`"
        raise ConfigError("model.path", config.model.path, problem, fix)
    weights = weights and config.model.load_format == "safetensors"
    try:
        folder = download(wanted, weights=weights)
    except HubError as error:
        raise ClusterError(f"{config.model.path} is no folder here; of the hub, {error}") from error
    model = dataclasses.replace(
        config.model,
        path=str(folder),
        name=config.model.name or wanted.repo,
        load_format=config.model.load_format if weights else "dummy",
    )
    return dataclasses.replace(config, model=model)


def model_like(wanted: ModelSection, running: ModelSection) -> ModelSection:
    """``wanted``, with the folder of the model that runs where it names that as the hub does.

    Nothing is downloaded.

    Raises:
        ConfigError: it names another.
    """
    named = HubModel.meant_by(wanted.path) if wanted.path else None
    if named is None:
        return wanted
    from deploy.checkpoint.hub import find_cached

    if str(find_cached(named)) != running.path:
        problem = f"another model runs, that of {running.path}"
        raise ConfigError("model.path", wanted.path, problem, "a cluster of its own for this one")
    return dataclasses.replace(wanted, path=running.path, name=wanted.name or named.repo)
