"""The model as the router knows it: a name, text in and out, and limits. No weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from router.models_file import read_models
from router.pool.members import Member
from router.text.call_history import CallHistory, call_history
from router.text.calls.formats import CALL_FORMATS, CallFormat
from router.text.checkpoint_files import read_json
from router.text.control_text import ControlText
from router.text.facts import read_text_facts
from router.text.marks import MarkTable, mark_table
from router.text.reasoning import ReasoningFormat, reasoning_format
from router.text.template import ChatTemplate, checkpoint_templates
from router.text.template_choice import Templates, choose_templates
from router.text.template_files import DEFAULT, TOOL_USE
from router.text.template_probe import check_bounded
from router.text.tokenizer import Tokenizer
from runtime.config import ClusterConfig, ModelSection
from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What requests are measured by."""

    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    """Token ids are below it."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormats:
    """How the model writes what is no plain text; None: it does not, or nobody here reads it."""

    marks: MarkTable
    """Of both."""
    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under one name, which workers register with, and its aliases."""

    name: str
    folder: Path
    """Of the checkpoint."""
    aliases: tuple[str, ...] = ()
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tool_template: ChatTemplate | None
    """For conversations with tools; most checkpoints have the same for both."""
    template_remark: str = ""
    """What was made of a checkpoint whose own template reads no tools; empty: nothing."""
    control_text: ControlText
    limits: ModelLimits
    created: int
    """Unix time of the checkpoint's config.json."""
    formats: MessageFormats
    """Of its output."""
    call_history: CallHistory | None
    """How the template takes earlier calls; None: it does not."""
    warm_grammars: bool = False
    """Whether what compiles grammars starts with the router."""
    remarks: tuple[str, ...] = ()
    """Sentences about the checkpoint's files, for people."""

    @property
    def names(self) -> tuple[str, ...]:
        """All that clients may ask for; its own first."""
        return self.name, *self.aliases

    def limits_with(self, members: Iterable[Member]) -> ModelLimits:
        """The limits, and no worker's context is exceeded either."""
        lengths = [member.max_model_len for member in members if member.max_model_len]
        shortest = min([self.limits.max_model_len, *lengths])
        return replace(self.limits, max_model_len=shortest)


def load_served_models(config: ClusterConfig) -> tuple[ServedModel, ...]:
    """All models of a router: that of ``model`` first, then those of ``router.models_file``.

    Raises:
        ConfigError: one of them cannot be served, or a name is that of two.
    """
    section = config.router
    models = [
        load_served_model(
            config.model, tool_parser=section.tool_parser, reasoning_parser=section.reasoning_parser
        )
    ]
    for entry in read_models(Path(section.models_file)) if section.models_file else ():
        of_entry = ModelSection(
            path=entry.path,
            name=entry.name,
            max_model_len=entry.max_model_len,
            chat_template=entry.chat_template,
            warm_grammars=config.model.warm_grammars,
        )
        model = load_served_model(
            of_entry, tool_parser=entry.tool_parser, reasoning_parser=entry.reasoning_parser
        )
        models.append(replace(model, aliases=entry.aliases))
    owners: dict[str, str] = {}
    for model in models:
        for name in model.names:
            other = owners.setdefault(name, model.name)
            if other != model.name or model.names.count(name) > 1:
                problem = f"is a name of {other!r}, too"
                raise ConfigError(f"models.{model.name}", name, problem, "a name of its own")
    if len({model.name for model in models}) < len(models):
        problem = "is the name of model.name and of a further model"
        raise ConfigError("router.models_file", models[0].name, problem, "another name")
    return tuple(models)


def load_served_model(
    section: ModelSection, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> ServedModel:
    """Read tokenizer, chat template and limits from the checkpoint's folder.

    Args:
        section: of the configuration.
        tool_parser: as ``router.tool_parser``.
        reasoning_parser: as ``router.reasoning_parser``.

    Raises:
        ConfigError: no folder, or a file in it is missing or broken.
    """
    folder = Path(section.path)
    config_path = folder / "config.json"
    if not section.path or not config_path.is_file():
        raise ConfigError(
            "model.path", section.path, "no config.json there", "a Hugging Face checkpoint folder"
        )
    config = read_json(config_path)
    tokenizer = Tokenizer.from_dir(folder)
    context = _context(section, config, folder)
    vocab_size = _positive(config, "vocab_size", folder)
    facts = read_text_facts(folder, tokenizer, vocab_size)
    templates = choose_templates(
        section.chat_template,
        _own_templates(folder),
        folder=folder,
        model_type=config.get("model_type"),
        tokenizer=tokenizer,
    )
    for found in filter(None, {templates.chat, templates.tools}):
        check_bounded(found)
    reasoning = reasoning_format(reasoning_parser, templates.source)
    history = None if templates.tools is None else call_history(templates.tools)
    calls = CALL_FORMATS.get(tool_parser)
    if tool_parser == "auto" and history is not None:
        calls = history.call_format
    return ServedModel(
        name=section.name or folder.resolve().name,
        folder=folder,
        aliases=tuple(filter(None, (name.strip() for name in section.aliases.split(",")))),
        tokenizer=tokenizer,
        chat_template=templates.chat,
        tool_template=templates.tools,
        template_remark=templates.remark,
        control_text=ControlText(tokenizer.control_tokens),
        limits=ModelLimits(
            max_model_len=context,
            vocab_size=vocab_size,
            eos_token_ids=facts.eos_token_ids,
        ),
        created=int(config_path.stat().st_mtime),
        formats=_message_formats(tokenizer, reasoning, calls),
        call_history=history,
        warm_grammars=section.warm_grammars,
        remarks=facts.remarks,
    )


def _context(section: ModelSection, config: dict[str, object], folder: Path) -> int:
    """Tokens of the longest request: what is asked for, or all that the checkpoint can."""
    context = _positive(config, "max_position_embeddings", folder)
    if section.max_model_len > context:
        raise ConfigError(
            "model.max_model_len",
            section.max_model_len,
            f"the checkpoint's context is {context}",
            f"at most {context}, or 0 for all of it",
        )
    return section.max_model_len or context


def _own_templates(folder: Path) -> Templates:
    """Those of the checkpoint."""
    own = checkpoint_templates(folder, DEFAULT, TOOL_USE)
    usual = own.get(DEFAULT)
    return Templates(chat=usual, tools=own.get(TOOL_USE, usual))


def _message_formats(
    tokenizer: Tokenizer, reasoning: ReasoningFormat | None, calls: CallFormat | None
) -> MessageFormats:
    marks = (
        *(() if reasoning is None else reasoning.marks),
        *(() if calls is None else calls.marks),
    )
    return MessageFormats(marks=mark_table(tokenizer, marks), reasoning=reasoning, calls=calls)


def _positive(config: dict[str, object], name: str, folder: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            "model.path", str(folder), f"config.json: {name} = {value!r}", "a positive integer"
        )
    return value
