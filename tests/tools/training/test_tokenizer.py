"""The tokenizer of the bundled model: round trips, special tokens, and the chat template."""

import json
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tools.training.architecture import BOS_ID, EOS_ID, PAD_ID, model_config
from tools.training.conversation import Exchange
from tools.training.dataset import CHECKPOINT
from tools.training.tokenizer import (
    ASSISTANT,
    BOS,
    CHAT_TEMPLATE,
    EOS,
    SPECIAL_TOKENS,
    USER,
    render,
    save_tokenizer,
    train_tokenizer,
)

pytestmark = pytest.mark.nightly

FOLDER = Path(__file__).parents[3] / CHECKPOINT
BUNDLED = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
# Text that spells a special token is the router's concern; here it would not round-trip.
TEXTS = st.text(max_size=200).filter(lambda text: not any(t in text for t in SPECIAL_TOKENS))


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_every_text_round_trips(text: str) -> None:
    ids = BUNDLED.encode(text).ids
    assert ids[0] == BOS_ID
    assert max(ids) < BUNDLED.get_vocab_size()
    assert BUNDLED.decode(ids) == text


def test_code_takes_few_tokens() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert len(text) / len(BUNDLED.encode(text).ids) > 2.4


def test_special_tokens_have_the_ids_of_the_config() -> None:
    assert BUNDLED.get_vocab_size() == model_config()["vocab_size"]
    for index, token in enumerate(SPECIAL_TOKENS):
        assert BUNDLED.token_to_id(token) == index
        assert BUNDLED.encode(token, add_special_tokens=False).ids == [index]
    assert (BOS_ID, EOS_ID, PAD_ID) == (0, 1, 2)


def test_the_chat_template_writes_what_training_read() -> None:
    config = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    template_file = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    assert config["chat_template"] == template_file
    template = jinja2.Environment(autoescape=False).from_string(template_file)
    question = {"role": "user", "content": "Add two numbers."}
    answer = {"role": "assistant", "content": "def add(a, b):\n    return a + b"}
    tokens = {"bos_token": BOS, "eos_token": EOS}
    full = template.render(messages=[question, answer], **tokens)
    expected = render(Exchange(question=question["content"], answer=answer["content"]))
    assert full == expected
    prompt = template.render(messages=[question], add_generation_prompt=True, **tokens)
    assert expected.startswith(prompt)
    assert expected.removeprefix(prompt) == answer["content"] + EOS


def test_the_chat_template_refuses_other_roles() -> None:
    environment = jinja2.Environment(autoescape=False)

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    template = environment.from_string((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="not wizard"):
        template.render(
            messages=[{"role": "wizard", "content": ""}], raise_exception=raise_exception
        )


def test_training_is_deterministic(tmp_path: Path) -> None:
    texts = ["def add(a, b):\n    return a + b\n" * 5, "for item in items:\n    print(item)\n" * 5]
    tokenizers = [train_tokenizer(texts, 320) for _ in range(2)]
    assert tokenizers[0].to_str() == tokenizers[1].to_str()
    save_tokenizer(tokenizers[0], tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_the_chat_template_writes_tools_calls_and_results() -> None:
    environment = jinja2.Environment(autoescape=False)
    environment.policies["json.dumps_kwargs"] = {}  # else keys are sorted
    template = environment.from_string(CHAT_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "now", "description": "The time."}}]
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    written = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    result = "<tool_response>\n4\n</tool_response>"
    end = f"{USER}When?{ASSISTANT}I look.\n{written}\n{written}{EOS}"
    end += f"{USER}{result}\n{result.replace('4', '5')}{ASSISTANT}"
    tokens = {"bos_token": BOS, "eos_token": EOS, "add_generation_prompt": True}
    assert template.render(messages=messages, **tokens) == f"{BOS}Be brief.{end}"
    offered = template.render(messages=messages, tools=tools, **tokens)
    assert offered.startswith(f"{BOS}Be brief.\n\n# Tools\n")
    assert offered.endswith(f'\nFunctions:\n{{"name": "now", "description": "The time."}}\n{end}')
    assert template.render(messages=messages[1:2], tools=tools, **tokens).startswith(
        f"{BOS}# Tools\n"
    )
