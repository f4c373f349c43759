"""What is wrong with the files that a configuration names, before anything heavy is imported.

`deploy.checks.cluster` looks at them again, and at all else; this is for an answer in a moment.
"""

from __future__ import annotations

from pathlib import Path

from router.keys.source import key_source
from runtime.config import ClusterConfig
from runtime.errors import ConfigError


def check_named_files(config: ClusterConfig) -> None:
    """Look at all but the model, which is `deploy.checkpoint.model_folder`'s.

    Raises:
        ConfigError: one cannot be read, or is not what it should be.
    """
    key_source(config)
    if config.tls.files is not None:
        config.tls.files.read()
    for field in ("router.models_file", "prefill.expert_load", "decode.expert_load"):
        section, _, key = field.partition(".")
        path = getattr(getattr(config, section), key)
        if path:
            _check_readable(field, path)


def _check_readable(field: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise ConfigError(
            field, path, str(error.strerror), "the path of a readable file"
        ) from error
