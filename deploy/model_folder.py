"""Where the model is that a configuration means: the folder that it names, or the bundled one.

Apart from the checks of `deploy.checks`, because it loads nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import deploy
from runtime.config import ClusterConfig

BUNDLED_MODEL = Path(deploy.__file__).resolve().parent / "models" / "tandem-python"


def with_model(config: ClusterConfig) -> ClusterConfig:
    """``config`` with the model's folder and name."""
    path = Path(config.model.path).expanduser() if config.model.path else BUNDLED_MODEL
    path = path.resolve()
    model = dataclasses.replace(config.model, path=str(path), name=config.model.name or path.name)
    return dataclasses.replace(config, model=model)
