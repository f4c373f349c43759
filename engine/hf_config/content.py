"""The `config.json` of a checkpoint folder, as it stands there."""

from pathlib import Path

from runtime.errors import ConfigError
from runtime.parsing import parse_json


def read_content(path: str | Path) -> dict[str, object]:
    """Return the content of the folder's `config.json`.

    Raises:
        ConfigError: no such file, or it holds no JSON object.
    """
    file = Path(path) / "config.json"
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "model.path",
            str(path),
            f"cannot read {file.name} ({error.strerror})",
            "point it to a checkpoint folder that holds config.json and *.safetensors",
        ) from error
    except ValueError as error:
        raise ConfigError(
            "model.path", str(path), f"{file.name} is not JSON: {error}", "download it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            "model.path", str(path), f"{file.name} is not an object", "download it again"
        )
    return content
