"""The tokenizer of the bundled model: byte-level BPE with the special tokens of DeepSeek-V3.

Bytes are the base alphabet, so every text round-trips and no unknown token exists. The special
tokens carry the spelling that DeepSeek-V3 uses (fullwidth bars and lower-one-eighth blocks), so
that templates and parsers written for it meet the same strings. A beginning-of-sentence token is
added by the post-processor; the chat template spells its own, and its text must therefore be
encoded without special tokens added.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.training.architecture import BOS_ID, CONTEXT, EOS_ID, PAD_ID
from tools.training.conversation import Exchange


def _special(words: str) -> str:
    """Spell a special token: `begin of sentence` between fullwidth bars, blanks as blocks."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


BOS: Final = _special("begin of sentence")
EOS: Final = _special("end of sentence")
PAD: Final = _special(" pad ")
USER: Final = _special("User")
ASSISTANT: Final = _special("Assistant")
# Their ids are their positions. The model has seen the first five; the others are reserved so
# that histories with reasoning or tools can be rendered.
SPECIAL_TOKENS: Final = (
    BOS,
    EOS,
    PAD,
    USER,
    ASSISTANT,
    "<think>",
    "</think>",
    _special("tool calls begin"),
    _special("tool call begin"),
    _special("tool sep"),
    _special("tool call end"),
    _special("tool calls end"),
    _special("tool outputs begin"),
    _special("tool output begin"),
    _special("tool output end"),
    _special("tool outputs end"),
)

CHAT_TEMPLATE: Final = (
    r"""
{%- macro declared() -%}
{{- '# Tools\n\nCall a function by writing its name and arguments so:\n<tool_call>\n' -}}
{{- '{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>\n\nFunctions:\n' -}}
{%- for tool in tools -%}
{{- tool['function'] | tojson + '\n' -}}
{%- endfor -%}
{%- endmacro -%}
{%- set turn = namespace(last='') -%}
{{- bos_token -}}
{%- if tools and (not messages or messages[0]['role'] not in ('system', 'developer')) -%}
{{- declared() -}}
{%- endif -%}
{%- for message in messages -%}
{%- set role = message['role'] -%}
{%- if role in ('system', 'developer') -%}
{{- message['content'] + ('\n\n' + declared() if tools and loop.first else '') -}}
{%- elif role == 'user' -%}
{{- '<USER>' + message['content'] -}}
{%- elif role == 'assistant' -%}
{{- '<ASSISTANT>' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- '\n' if message['content'] or not loop.first else '' -}}
{{- '<tool_call>\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
{{- eos_token -}}
{%- elif role == 'tool' -%}
{{- '\n' if turn.last == 'tool' else '<USER>' -}}
{{- '<tool_response>\n' + message['content'] + '\n</tool_response>' -}}
{%- else -%}
{{- raise_exception('the roles are system, user, assistant and tool, not ' + role) -}}
{%- endif -%}
{%- set turn.last = role -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<ASSISTANT>' -}}{%- endif -%}
""".lstrip()
    .replace("<USER>", USER)
    .replace("<ASSISTANT>", ASSISTANT)
)
"""Conversations as the model was trained on them; the tools' part it has never seen."""


def render(exchange: Exchange) -> str:
    """Return the text of one exchange as the chat template renders it."""
    return f"{BOS}{USER}{exchange.question}{ASSISTANT}{exchange.answer}{EOS}"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn the merges from texts.

    Args:
        texts: training documents; the result depends on their order only in ties.
        vocab_size: number of ids, special tokens included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    assert [tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)] == [BOS_ID, EOS_ID, PAD_ID]
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into a folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
