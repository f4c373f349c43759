"""The templates that ship write what is published: turns, tools, calls, results, thoughts.

DeepSeek's marks stand here with plain bars and spaces: ``<|tool calls begin|>``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.errors import RequestError
from router.text.call_history import call_history
from router.text.calls.formats import CALL_FORMATS
from router.text.template_choice import shipped_template
from runtime.config.templates import SHIPPED

FOLDER = Path(__file__).parents[3] / "router" / "text" / "chat_templates"
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Weather?"}
ANSWER = {"role": "assistant", "content": "Rain."}
MORE = {"role": "user", "content": "And now?"}
WEATHER = {
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW = {"name": "now"}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}}'


def call(name: str, arguments: dict[str, Any], number: int, *, as_text: bool) -> dict[str, Any]:
    given = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    function = {"name": name, "arguments": given}
    return {"id": f"functions.{name}:{number}", "type": "function", "function": function}


def calling(*, as_text: bool = True, **more: object) -> dict[str, Any]:
    """Two calls at once."""
    city = {"city": "K\u00f6ln", "days": [1, {"a": None}]}
    calls = [call("weather", city, 0, as_text=as_text), call("now", {}, 1, as_text=as_text)]
    return {"role": "assistant", "content": "I look.", "tool_calls": calls, **more}


RESULTS = [
    {"role": "tool", "tool_call_id": "functions.weather:0", "content": "rain"},
    {"role": "tool", "tool_call_id": "functions.now:1", "content": "noon"},
]
THOUGHT: dict[str, Any] = {"reasoning_content": "Hm."}


def deepseek(text: str) -> str:
    """``text`` with DeepSeek's spelling of its marks."""
    text = text.replace("|DSML|", "\uff5cDSML\uff5c")
    return re.sub(
        r"<\|([A-Za-z ]+)\|>",
        lambda mark: f"<\uff5c{mark[1].replace(' ', chr(0x2581))}\uff5c>",
        text,
    )


def rendered(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return shipped_template(name).render(messages, **options)


def test_all_that_ships_has_a_name() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(SHIPPED)


@pytest.mark.parametrize(
    ("name", "call_format", "wants_objects"),
    [
        ("deepseek-v3", "deepseek-v3", False),
        ("deepseek-r1", "deepseek-v3", False),
        ("deepseek-v3.1", "deepseek-v3.1", False),
        ("deepseek-v3.2", "deepseek-v3.2", True),
        ("kimi-k2", "kimi-k2", False),
    ],
)
def test_its_calls_are_recognised(name: str, call_format: str, wants_objects: bool) -> None:
    template = shipped_template(name)
    assert "tools" in template.variables
    history = call_history(template)
    assert history is not None
    assert history.call_format is CALL_FORMATS[call_format]
    assert (history.wants_objects, history.takes_both, history.reads_results) == (
        wants_objects,
        True,
        True,
    )


BEGIN = "<|begin of sentence|>"
PLAIN = {
    "deepseek-v3": (
        "Be brief.<|User|>Weather?<|Assistant|>Rain.<|end of sentence|><|User|>And now?",
        "<|Assistant|>",
    ),
    "deepseek-r1": (
        "Be brief.<|User|>Weather?<|Assistant|>Rain.<|end of sentence|><|User|>And now?",
        "<|Assistant|><think>\n",
    ),
    "deepseek-v3.1": (
        "Be brief.<|User|>Weather?<|Assistant|></think>Rain.<|end of sentence|><|User|>And now?",
        "<|Assistant|></think>",
    ),
    "deepseek-v3.2": (
        "Be brief.<|User|>Weather?<|Assistant|></think>Rain.<|end of sentence|><|User|>And now?",
        "<|Assistant|></think>",
    ),
}
"""A conversation, and what stands before the next answer."""


@pytest.mark.parametrize("name", PLAIN)
def test_deepseeks_plain_conversations(name: str) -> None:
    text, prompt = PLAIN[name]
    messages = [SYSTEM, USER, ANSWER, MORE]
    assert rendered(name, messages) == deepseek(BEGIN + text + prompt)
    assert rendered(name, [{**SYSTEM, "role": "developer"}, *messages[1:]]) == deepseek(
        BEGIN + text + prompt
    )
    begun = rendered(name, messages[:3], continue_final_message=True)
    assert begun == deepseek(BEGIN + text.partition("<|end of sentence|>")[0])
    assert rendered(name, [USER]).startswith(deepseek(f"{BEGIN}<|User|>Weather?<|Assistant|>"))
    with pytest.raises(RequestError, match="not wizard"):
        rendered(name, [{"role": "wizard", "content": ""}])


CALLS_V3 = (
    "I look.<|tool calls begin|>"
    "<|tool call begin|>function<|tool sep|>weather\n```json\n"
    '{"city": "K\u00f6ln", "days": [1, {"a": null}]}\n```<|tool call end|>\n'
    "<|tool call begin|>function<|tool sep|>now\n```json\n{}\n```<|tool call end|>"
    "<|tool calls end|><|end of sentence|>"
)
RESULTS_V3 = (
    "<|tool outputs begin|><|tool output begin|>rain<|tool output end|>\n"
    "<|tool output begin|>noon<|tool output end|><|tool outputs end|>"
)


@pytest.mark.parametrize(("name", "prompt"), [("deepseek-v3", ""), ("deepseek-r1", "<think>\n")])
@pytest.mark.parametrize("as_text", [True, False])
def test_tools_of_v3_and_r1(name: str, prompt: str, as_text: bool) -> None:
    messages = [USER, calling(as_text=as_text), *RESULTS]
    text = f"{BEGIN}<|User|>Weather?<|Assistant|>{CALLS_V3}{RESULTS_V3}"
    assert rendered(name, messages) == deepseek(text)  # the model goes on behind the results
    answered = f"{text}Rain.<|end of sentence|><|User|>And now?<|Assistant|>{prompt}"
    assert rendered(name, [*messages, ANSWER, MORE]) == deepseek(answered)
    again = f"{text}{CALLS_V3}{RESULTS_V3}"
    assert rendered(name, [*messages, calling(), *RESULTS]) == deepseek(again)
    declared = rendered(name, [SYSTEM, USER], tools=TOOLS)
    form = '<|tool calls begin|><|tool call begin|>function<|tool sep|>NAME\n```json\n{"ARGUMENT"'
    assert declared.startswith(deepseek(f"{BEGIN}Be brief.\n\n## Tools\n\n"))
    assert f"- `weather`: Of a city.\n```json\n{SCHEMA}\n```\n\n- `now`\n```json\n{{}}" in declared
    assert deepseek(form) in declared
    assert declared.endswith(deepseek(f"<|User|>Weather?<|Assistant|>{prompt}"))
    assert rendered(name, [USER], tools=TOOLS).startswith(deepseek(f"{BEGIN}## Tools"))


def test_r1_forgets_what_it_thought() -> None:
    thought = {"role": "assistant", "content": "<think>Hm.</think>Rain.", **THOUGHT}
    text = f"{BEGIN}<|User|>Weather?<|Assistant|>Rain.<|end of sentence|>"
    text += "<|User|>And now?<|Assistant|><think>\n"
    assert rendered("deepseek-r1", [USER, thought, MORE]) == deepseek(text)


def test_tools_of_v31() -> None:
    calls = (
        "<|Assistant|></think>I look.<|tool calls begin|><|tool call begin|>weather<|tool sep|>"
        '{"city": "K\u00f6ln", "days": [1, {"a": null}]}<|tool call end|>'
        "<|tool call begin|>now<|tool sep|>{}<|tool call end|><|tool calls end|><|end of sentence|>"
    )
    results = "<|tool output begin|>rain<|tool output end|><|tool output begin|>noon"
    text = f"{BEGIN}<|User|>Weather?{calls}{results}<|tool output end|>"
    for as_text in (True, False):
        messages = [USER, calling(as_text=as_text), *RESULTS]
        assert rendered("deepseek-v3.1", messages) == deepseek(text)
    answered = f"{text}Rain.<|end of sentence|><|User|>And now?<|Assistant|></think>"
    assert rendered("deepseek-v3.1", [*messages, ANSWER, MORE]) == deepseek(answered)
    declared = rendered("deepseek-v3.1", [SYSTEM, USER], tools=TOOLS)
    assert declared.startswith(deepseek(f"{BEGIN}Be brief.\n\n## Tools\n"))
    assert f"\n### weather\nDescription: Of a city.\n\nParameters: {SCHEMA}\n" in declared
    form = "<|tool calls begin|><|tool call begin|>tool_call_name<|tool sep|>tool_call_arguments"
    assert deepseek(f"{form}<|tool call end|><|tool calls end|>") in declared
    assert declared.endswith(deepseek("<|User|>Weather?<|Assistant|></think>"))
    assert rendered("deepseek-v3.1", [USER], tools=TOOLS).startswith(
        deepseek(f"{BEGIN}\n\n## Tools")
    )


def test_thoughts_of_v31_are_switched() -> None:
    thought = {"role": "assistant", "content": "Hm.</think>Rain."}
    text = f"{BEGIN}<|User|>Weather?<|Assistant|></think>Rain.<|end of sentence|><|User|>And now?"
    for thinking, mark in ((True, "<think>"), (False, "</think>")):
        found = rendered("deepseek-v3.1", [USER, thought, MORE], extra={"thinking": thinking})
        assert found == deepseek(f"{text}<|Assistant|>{mark}")


CALLS_V32 = (
    "I look.\n\n<|DSML|function_calls>\n"
    '<|DSML|invoke name="weather">\n'
    '<|DSML|parameter name="city" string="true">K\u00f6ln</|DSML|parameter>\n'
    '<|DSML|parameter name="days" string="false">[1, {"a": null}]</|DSML|parameter>\n'
    "</|DSML|invoke>\n"
    '<|DSML|invoke name="now">\n</|DSML|invoke>\n'
    "</|DSML|function_calls><|end of sentence|>"
)
RESULTS_V32 = (
    "\n\n<function_results>\n<result>rain</result>\n<result>noon</result>\n</function_results>\n\n"
)


def test_tools_of_v32() -> None:
    messages = [USER, calling(as_text=False), *RESULTS]
    text = f"{BEGIN}<|User|>Weather?<|Assistant|></think>{CALLS_V32}{RESULTS_V32}</think>"
    assert rendered("deepseek-v3.2", messages) == deepseek(text)
    answered = f"{text}Rain.<|end of sentence|><|User|>And now?<|Assistant|></think>"
    assert rendered("deepseek-v3.2", [*messages, ANSWER, MORE]) == deepseek(answered)
    declared = rendered("deepseek-v3.2", [SYSTEM, USER], tools=TOOLS)
    assert declared.startswith(deepseek(f"{BEGIN}Be brief.\n\n## Tools\n"))
    functions = "\n".join(json.dumps(function) for function in (WEATHER, NOW))
    end = f"\n<functions>\n{functions}\n</functions>\n<|User|>Weather?<|Assistant|></think>"
    assert declared.endswith(deepseek(end))
    form = '<|DSML|function_calls>\n<|DSML|invoke name="$FUNCTION_NAME">\n<|DSML|parameter name='
    assert deepseek(form) in declared
    assert declared.count("## Tools") == 1
    assert rendered("deepseek-v3.2", [USER], tools=TOOLS).startswith(
        deepseek(f"{BEGIN}\n\n## Tools")
    )


def test_v32_keeps_its_thoughts_while_it_calls() -> None:
    thinking = {"extra": {"thinking": True}}
    messages = [USER, calling(as_text=False, **THOUGHT), *RESULTS]
    text = f"{BEGIN}<|User|>Weather?<|Assistant|><think>Hm.</think>{CALLS_V32}{RESULTS_V32}<think>"
    assert rendered("deepseek-v3.2", messages, **thinking) == deepseek(text)
    later = [*messages, {**ANSWER, **THOUGHT}, MORE]
    text = f"{BEGIN}<|User|>Weather?<|Assistant|></think>{CALLS_V32}{RESULTS_V32}</think>Rain."
    text += "<|end of sentence|><|User|>And now?<|Assistant|><think>"
    assert rendered("deepseek-v3.2", later, **thinking) == deepseek(text)


KIMI_SYSTEM = "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
KIMI_USER = "<|im_user|>user<|im_middle|>Weather?<|im_end|>"
KIMI_PROMPT = "<|im_assistant|>assistant<|im_middle|>"
KIMI_CALLS = (
    "I look.<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "K\u00f6ln", "days": [1, {"a": null}]}<|tool_call_end|>'
    "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|><|im_end|>"
)
KIMI_RESULTS = (
    "<|im_system|>weather<|im_middle|>## Return of functions.weather:0\nrain<|im_end|>"
    "<|im_system|>tool<|im_middle|>## Return of functions.now:1\nnoon<|im_end|>"
)


def test_kimis_conversations() -> None:
    usual = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI."
    assert rendered("kimi-k2", [USER]) == f"{usual}<|im_end|>{KIMI_USER}{KIMI_PROMPT}"
    for role in ("system", "developer"):
        messages = [{**SYSTEM, "role": role}, USER, ANSWER]
        text = f"{KIMI_SYSTEM}{KIMI_USER}{KIMI_PROMPT}Rain."
        assert rendered("kimi-k2", messages) == f"{text}<|im_end|>{KIMI_PROMPT}"
        assert rendered("kimi-k2", messages, continue_final_message=True) == text
    with pytest.raises(RequestError, match="not wizard"):
        rendered("kimi-k2", [{"role": "wizard", "content": ""}])


def test_kimis_tools() -> None:
    results = [{**RESULTS[0], "name": "weather"}, RESULTS[1]]
    text = f"{KIMI_SYSTEM}{KIMI_USER}{KIMI_PROMPT}{KIMI_CALLS}{KIMI_RESULTS}{KIMI_PROMPT}"
    for as_text in (True, False):
        messages = [SYSTEM, USER, calling(as_text=as_text), *results]
        assert rendered("kimi-k2", messages) == text
    tools = (
        '[{"type":"function","function":{"name":"weather","description":"Of a city.",'
        '"parameters":{"type":"object","properties":{"city":{"type":"string"}}}}},'
        '{"type":"function","function":{"name":"now"}}]'
    )
    declared = f"<|im_system|>tool_declare<|im_middle|>{tools}<|im_end|>"
    assert rendered("kimi-k2", messages, tools=TOOLS) == declared + text


def test_kimis_thoughts_are_kept_until_it_answers() -> None:
    thinks = calling(**THOUGHT)
    results = [{**RESULTS[0], "name": "weather"}, RESULTS[1]]
    text = f"{KIMI_SYSTEM}{KIMI_USER}{KIMI_PROMPT}<think>Hm.</think>{KIMI_CALLS}{KIMI_RESULTS}"
    assert rendered("kimi-k2", [SYSTEM, USER, thinks, *results]) == text + KIMI_PROMPT
    text = text.replace("Hm.", "") + f"{KIMI_PROMPT}<think></think>Rain.<|im_end|>"
    messages = [SYSTEM, USER, thinks, *results, {**ANSWER, **THOUGHT}, MORE]
    more = f"<|im_user|>user<|im_middle|>And now?<|im_end|>{KIMI_PROMPT}"
    assert rendered("kimi-k2", messages) == text + more
