"""``/tokenize`` and ``/detokenize`` over HTTP, and as the translations that they are."""

from __future__ import annotations

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError
from router.http.apis.tokenization import TokenizeRequest, as_generation
from router.http.openai.hints import IGNORED_HEADER
from router.http.openai.schema import ChatRequest, CompletionRequest, validated
from tests.router.conftest import ANSWER, MODEL, Cluster
from tests.router.outputs import MAX_MODEL_LEN

MESSAGES = [{"role": "user", "content": "say hello"}]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


async def post(http: aiohttp.ClientSession, path: str, **body: object) -> tuple[int, dict]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def test_tokens_of_a_prompt(http, cluster: Cluster) -> None:
    status, answer = await post(http, "/tokenize", model=MODEL, prompt=ANSWER)
    assert status == 200
    assert answer["tokens"] == cluster.tokenizer.encode(ANSWER, add_special_tokens=True)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert answer["token_strs"] is None
    bare = {"add_special_tokens": False, "return_token_strs": True}
    _, answer = await post(http, "/tokenize", prompt="<eos>fox", **bare)
    assert answer["tokens"] == cluster.tokenizer.encode("<eos>fox", add_special_tokens=False)
    assert answer["token_strs"][0] == "<eos>"
    assert "".join(answer["token_strs"]) == "<eos>fox"


async def test_tokens_are_those_that_the_endpoints_give_the_model(http, cluster: Cluster) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "the quick <user> fox"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        (
            "/v1/chat/completions",
            {
                "messages": [*MESSAGES, {"role": "assistant", "content": "Sure <eos>"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
    ):
        _, tokenized = await post(http, "/tokenize", model=MODEL, **body)
        status, _ = await post(http, path, model=MODEL, max_tokens=1, **body)
        assert status == 200
        assert tokenized["tokens"] == list(cluster.prefill.seen[-1].context_token_ids)


async def test_a_prompt_longer_than_the_context_is_counted(http, cluster: Cluster) -> None:
    status, answer = await post(http, "/tokenize", prompt="x y " * MAX_MODEL_LEN)
    assert status == 200
    assert answer["count"] > MAX_MODEL_LEN
    status, answer = await post(http, "/tokenize", prompt="x y " * 100 * MAX_MODEL_LEN)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_text_of_tokens(http, cluster: Cluster) -> None:
    ids = cluster.tokenizer.encode(f"<bos>{ANSWER}<eos>", add_special_tokens=False)
    assert await post(http, "/detokenize", model=MODEL, tokens=ids) == (
        200,
        {"prompt": f"<bos>{ANSWER}<eos>"},
    )
    assert await post(http, "/detokenize", tokens=[]) == (200, {"prompt": ""})


async def test_what_is_ignored_is_told_by_a_header(http, cluster: Cluster) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {"thinking": True}}
    async with http.post("/tokenize", json=body) as response:
        assert response.status == 200
        assert response.headers[IGNORED_HEADER] == "chat_template_kwargs.thinking"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        (
            "/tokenize",
            {"prompt": "x", "continue_final_message": True},
            400,
            "continue_final_message",
        ),
        ("/tokenize", {"prompt": "x", "truncate": 3}, 400, "truncate"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_special_tokens": True},
            400,
            "add_special_tokens",
        ),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_generation_prompt": False},
            400,
            "add_generation_prompt",
        ),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [10**7]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": True}, 400, "skip_special_tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_invalid_values_name_the_field(
    http, cluster: Cluster, *, path: str, body: dict[str, object], status: int, param: str
) -> None:
    found, answer = await post(http, path, **body)
    assert found == status
    assert answer["error"]["param"].startswith(param)
    assert param.rpartition(".")[2] in answer["error"]["message"]
    assert cluster.prefill.seen == []


@given(
    prompt=st.none() | TEXTS,
    messages=st.none() | st.lists(st.builds(lambda t: {"role": "user", "content": t}, TEXTS)),
    special=st.none() | st.booleans(),
    final=st.none() | st.booleans(),
)
def test_a_translation_keeps_what_was_said_or_names_what_was_wrong(
    prompt: str | None,
    messages: list[dict[str, str]] | None,
    special: bool | None,
    final: bool | None,
) -> None:
    fields: dict[str, object] = {
        "prompt": prompt,
        "messages": messages,
        "add_special_tokens": special,
        "continue_final_message": final,
    }
    request = validated(fields, TokenizeRequest)
    is_chat = messages is not None
    wrong = (prompt is None) != is_chat or (special if is_chat else final is not None)
    if wrong or messages == []:
        with pytest.raises(RequestError) as caught:
            as_generation(request)
        assert caught.value.param in fields
        assert str(caught.value.param) in caught.value.message
        return
    found = as_generation(request)
    if isinstance(found, CompletionRequest):
        assert messages is None
        assert (found.prompt, found.add_special_tokens) == ([prompt], special)
    else:
        assert isinstance(found, ChatRequest)
        assert prompt is None
        assert (found.messages, found.continue_final_message) == (messages, final)
