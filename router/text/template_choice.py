"""Which chat templates a model is served with: its checkpoint's own, one that ships, or a file.

DeepSeek's checkpoints come with templates that read no tools, or with none, though their models
know tools. So templates for them ship beside this file, and "auto" takes one where the checkpoint's
own says nothing of tools. Which one, the checkpoint tells: its vocabulary, what its own template
writes, and the kind of its model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.text.calls.deepseek import CALL_BEGIN
from router.text.calls.dsml import DSML
from router.text.calls.kimi import KIMI_MARKS
from router.text.checkpoint_files import special_tokens
from router.text.template import ChatTemplate
from router.text.tokenizer import Tokenizer
from runtime.config.templates import AUTO, FIELD, SHIPPED
from runtime.errors import ConfigError

_FOLDER = Path(__file__).parent / "chat_templates"
_DEEPSEEK_USER, _KIMI_TURN = "<\uff5cUser\uff5c>", "<|im_middle|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """Those of one model."""

    chat: ChatTemplate | None
    tools: ChatTemplate | None
    """For conversations with tools; most checkpoints have the same for both."""
    remark: str = ""
    """What "auto" made of a checkpoint whose own template reads no tools, as a sentence."""

    @property
    def source(self) -> str:
        """All that they say."""
        return "".join(found.source for found in (self.chat, self.tools) if found is not None)


def choose_templates(
    choice: str, own: Templates, *, folder: Path, model_type: object, tokenizer: Tokenizer
) -> Templates:
    """The templates that ``model.chat_template`` = ``choice`` stands for.

    Args:
        choice: "auto", the name of one that ships, or the path of a file.
        own: those of the checkpoint.
        folder: of the checkpoint.
        model_type: as its config.json says it.
        tokenizer: its own.

    Raises:
        ConfigError: the file cannot be read, or is no template.
    """
    if choice == AUTO:
        return _completed(own, _fitting(own.chat, model_type, tokenizer))
    template = shipped_template(choice) if choice in SHIPPED else _from_file(choice, folder)
    return Templates(chat=template, tools=template)


def shipped_template(name: str) -> ChatTemplate:
    """The template of that name that ships."""
    # They spell their special tokens: these are of the format, not of a checkpoint.
    text = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(text, {}, origin=f'{FIELD} = "{name}"')


def _completed(own: Templates, fitting: str | None) -> Templates:
    """``own``, with one that ships in place of what does not read tools."""
    if own.tools is not None and "tools" in own.tools.variables:
        return own
    lacks = "has no chat template" if own.chat is None else "has a chat template without tools"
    if fitting is None:
        fix = f'{FIELD} = "NAME" takes one of {", ".join(SHIPPED)}, or a file'
        remark = f"the checkpoint {lacks}, and none that ships is known to fit: {fix}"
        return Templates(chat=own.chat, tools=own.tools, remark=remark)
    shipped = shipped_template(fitting)
    whose = "requests" if own.chat is None else "requests with tools"
    remark = f'the checkpoint {lacks}: {whose} are written by {FIELD} = "{fitting}", which ships'
    return Templates(chat=own.chat or shipped, tools=shipped, remark=remark)


def _fitting(own: ChatTemplate | None, model_type: object, tokenizer: Tokenizer) -> str | None:
    """The name of the one that ships for this family; None: it is none of them."""

    def knows(token: str) -> bool:
        return tokenizer.token_id(token) is not None or (own is not None and token in own.source)

    if own is None:
        if knows(DSML) or model_type == "deepseek_v32":
            return "deepseek-v3.2"
        return "kimi-k2" if knows(KIMI_MARKS.call_begin) else None
    if _DEEPSEEK_USER in own.source and knows(DSML):
        return "deepseek-v3.2"
    if _DEEPSEEK_USER in own.source and knows(CALL_BEGIN):
        if "thinking" in own.variables:
            return "deepseek-v3.1"
        return "deepseek-r1" if "</think>" in own.source else "deepseek-v3"
    return "kimi-k2" if _KIMI_TURN in own.source and knows(KIMI_MARKS.call_begin) else None


def _from_file(choice: str, folder: Path) -> ChatTemplate:
    fix = f"a file with a Jinja template, or one of {', '.join((AUTO, *SHIPPED))}"
    try:
        text = Path(choice).read_text(encoding="utf-8")
        return ChatTemplate(text, special_tokens(folder), origin=choice)
    except OSError as error:
        raise ConfigError(FIELD, choice, error.strerror or str(error), fix) from error
    except UnicodeDecodeError as error:
        raise ConfigError(FIELD, choice, "is no text in UTF-8", fix) from error
    except ConfigError as error:
        raise ConfigError(FIELD, choice, error.problem, error.fix) from error
