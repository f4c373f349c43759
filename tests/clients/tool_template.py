"""The bundled model with a chat template that reads tools: grammars make it call."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = """
{{- bos_token -}}
{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content }}
{%- elif message.role == 'user' -%}<\uff5cUser\uff5c>{{ message.content }}
{%- elif message.role == 'tool' -%}<\uff5cUser\uff5c>[{{ message.content }}]
{%- else -%}<\uff5cAssistant\uff5c>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}
</tool_call>
{%- endfor -%}
{{ eos_token }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<\uff5cAssistant\uff5c>{%- endif -%}
"""


def model_with_tools(model: Path, folder: Path) -> Path:
    """A checkpoint in ``folder`` that is ``model``, linked, but for its chat template."""
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE.strip(), encoding="utf-8")
    return folder
