"""What ``tandem validate`` says of the checkpoints that a configuration names, file by file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.weights.checkpoint import CheckpointError, tensor_names
from engine.weights.left_out import known_by_name
from router.model import ServedModel, load_served_models
from router.text.template import checkpoint_templates
from router.text.template_files import template_sources
from router.text.template_probe import describe_template
from runtime.config import ClusterConfig
from runtime.errors import ConfigError


def checkpoint_lines(config: ClusterConfig) -> Iterator[str]:
    """Lines about every model that the router serves: names, templates, what was joined.

    Raises:
        ConfigError: one of them cannot be served.
    """
    first, *others = load_served_models(config)
    yield from _lines_of(first)
    if config.model.load_format == "safetensors":
        yield from _of_weights(Path(config.model.path))
    for model in others:
        yield f"beside it    {', '.join(model.names)}"
        yield from _lines_of(model)


def _lines_of(model: ServedModel) -> Iterator[str]:
    used = dict.fromkeys(filter(None, (model.chat_template, model.tool_template)))
    if not used:
        yield "template     none: /v1/completions only"
    for template in used:
        yield f"template     {template.origin}: {describe_template(template)}"
    origins = {template.origin for template in used}
    for name, source in template_sources(model.folder).items():
        if source.origin in origins:
            continue
        try:
            checkpoint_templates(model.folder, name)
        except ConfigError as error:
            yield f"note         the template {name!r} is not used, and {error.problem}"
    for remark in filter(None, (model.template_remark, *model.remarks)):
        yield f"note         {remark}"


def _of_weights(folder: Path) -> Iterator[str]:
    try:
        kinds = known_by_name(tensor_names(folder))
    except CheckpointError as error:
        raise ConfigError("model.path", str(folder), str(error), "a whole checkpoint") from error
    if kinds:
        told = ", ".join(f"{kind} ({number})" for kind, number in kinds.items())
        yield f"note         tensors that are not used here: {told}"
