"""``/v1/messages`` over HTTP, and its translation into a chat request."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import NotReadyError, RequestError, TooManyRequestsError
from router.http.apis.messages.answer import ANTHROPIC
from router.http.apis.messages.request import MessagesRequest, as_chat
from router.http.errors import failure_from
from router.http.openai.schema import validated
from router.model import ServedModel, load_served_model
from runtime.config import ModelSection
from runtime.errors import ERRORS_BY_CODE, PeerLostError
from tests.router.conftest import ANSWER, MODEL, Cluster, StartRouter
from tests.router.http.test_operations import metric_values
from tests.waiting import until

TURNS = [{"role": "user", "content": "say hello"}]
BODY = {"model": MODEL, "max_tokens": 100, "messages": TURNS}


async def ask(http: aiohttp.ClientSession, **change: object) -> tuple[int, dict]:
    body = {name: value for name, value in {**BODY, **change}.items() if value != "absent"}
    async with http.post("/v1/messages", json=body) as response:
        return response.status, await response.json()


async def events(http: aiohttp.ClientSession, **change: object) -> list[dict]:
    """Of a whole stream; the name of each is its type."""
    async with http.post("/v1/messages", json={**BODY, **change, "stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        raw = await response.read()
    assert b"[DONE]" not in raw
    found = []
    for lines in raw.removesuffix(b"\n\n").split(b"\n\n"):
        if lines.startswith(b":"):
            continue
        name, data = lines.split(b"\n")
        found.append(orjson.loads(data.removeprefix(b"data: ")))
        assert name.decode() == f"event: {found[-1]['type']}"
    return found


async def test_an_answer(http, cluster: Cluster) -> None:
    blocks = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    cached = {"type": "text", "text": "say hello", "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": [cached]}]
    status, answer = await ask(http, system=blocks, messages=turns, top_k=5, metadata={"a": "b"})
    assert status == 200
    text = "<bos>be brief<user>say hello<assistant>"
    prompt = cluster.tokenizer.encode(text, add_special_tokens=False)
    assert list(cluster.prefill.seen[0].context_token_ids) == prompt
    assert cluster.decode.seen[0].sampling.top_k == 5
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert answer["content"] == [{"type": "text", "text": ANSWER}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    num_cached = len(prompt) // 2
    assert answer["usage"] == {
        "input_tokens": len(prompt) - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": cluster.num_answer_tokens,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    values = await metric_values(http)
    assert (
        values["pd_router_requests_total{endpoint=/v1/messages,model=org/tiny-model,status=200}"]
        == 1
    )


async def test_a_stream(http, cluster: Cluster) -> None:
    found = await events(http)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert len(kinds) > 10
    assert "".join(event["delta"]["text"] for event in found[2:-3]) == ANSWER
    start, end = found[0]["message"], found[-2]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] > 0
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == cluster.num_answer_tokens


async def test_why_an_answer_ended(http, cluster: Cluster) -> None:
    _, answer = await ask(http, max_tokens=3)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert answer["usage"]["output_tokens"] == 3
    _, answer = await ask(http, stop_sequences=["never", "END"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    assert answer["content"][0]["text"] == ANSWER[: ANSWER.index("END")]
    found = await events(http, stop_sequences=["END"])
    assert found[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


async def test_a_last_turn_of_the_assistant_goes_on(http, cluster: Cluster) -> None:
    turns = [*TURNS, {"role": "assistant", "content": "Sure,"}]
    status, answer = await ask(http, messages=turns)
    assert status == 200
    text = "<bos><user>say hello<assistant>Sure,"
    expected = cluster.tokenizer.encode(text, add_special_tokens=False)
    assert list(cluster.prefill.seen[0].context_token_ids) == expected
    assert answer["content"] == [{"type": "text", "text": ANSWER}]


async def test_a_failure_within_a_stream_is_an_event(http, cluster: Cluster) -> None:
    cluster.decode.fail_after = 3
    found = await events(http)
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "overloaded_error"
    assert found[-1]["request_id"].startswith("req-")
    assert "message_stop" not in [event["type"] for event in found]


async def test_a_long_wait_is_filled_with_comments(start_router: StartRouter) -> None:
    cluster = await start_router(keep_alive_s=0.05)
    prefill = await cluster.add_prefill()
    await cluster.add_decode()
    await until(lambda: cluster.decode.num_streams > 0)
    prefill.run_s = 0.3
    async with aiohttp.ClientSession(cluster.url) as http:
        found = await events(http)
    assert found[-1]["type"] == "message_stop"


async def test_an_answer_goes_on_at_another_worker(http, cluster: Cluster) -> None:
    expected = await ask(http)
    other = await cluster.add_decode("decode-1")
    await until(lambda: other.num_streams > 0)
    for decode in cluster.decodes:
        decode.fail_error, decode.fail_after = PeerLostError("gone"), 3
    seen = sum(len(decode.seen) for decode in cluster.decodes)
    status, answer = await ask(http)
    assert (status, {**answer, "id": 0}) == (200, {**expected[1], "id": 0})
    assert sum(len(decode.seen) for decode in cluster.decodes) == seen + 2


async def test_a_client_that_leaves_ends_its_request(cluster: Cluster) -> None:
    cluster.decode.hold_after = 2
    async with (
        aiohttp.ClientSession(cluster.url) as http,
        http.post("/v1/messages", json={**BODY, "stream": True}) as response,
    ):
        await response.content.readline()
    await until(lambda: len(cluster.decode.aborted) == 1)


TOOL = {"name": "f", "input_schema": {"type": "object"}}
EFFORT = {"effort": "low"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CALLS = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}],
}
RESULTS = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("change", "status", "kind", "name"),
    [
        ({"model": "other"}, 404, "not_found_error", "model"),
        ({"max_tokens": "absent"}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            400,
            "invalid_request_error",
            "messages[0].role",
        ),
        (
            {
                "messages": [
                    *TURNS,
                    {"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]},
                ]
            },
            400,
            "invalid_request_error",
            "messages[1].content[1].type",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "name": "me"}]},
            400,
            "invalid_request_error",
            "messages[0].name",
        ),
        ({"messages": [{"role": "user"}]}, 400, "invalid_request_error", "messages[0].content"),
        ({"system": [IMAGE]}, 400, "invalid_request_error", "system[0].type"),
        ({"system": 3}, 400, "invalid_request_error", "system"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        ({"tools": [TOOL]}, 400, "invalid_request_error", "tools"),
        ({"tools": [{**TOOL, "name": "a b"}]}, 400, "invalid_request_error", "tools[0].name"),
        ({"tools": [{"type": "mcp_toolset"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"tools": [SEARCH, {"name": "f"}]}, 400, "invalid_request_error", "tools[1].input_schema"),
        ({"tools": [TOOL], "tool_choice": "any"}, 400, "invalid_request_error", "tool_choice"),
        ({"thinking": {"type": "nonsense"}}, 400, "invalid_request_error", "thinking.type"),
        ({"contxt_management": {}}, 400, "invalid_request_error", "contxt_management"),
        ({"messages": [CALLS]}, 400, "invalid_request_error", "messages[0].content"),
        ({"messages": [*TURNS, CALLS, RESULTS]}, 400, "invalid_request_error", "messages[1]"),
        ({"messages": [RESULTS]}, 400, "invalid_request_error", "messages[0].tool_use_id"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"stop_sequences": ["a", 3]}, 400, "invalid_request_error", "stop_sequences[1]"),
        ({"temperature": 3}, 400, "invalid_request_error", "temperature"),
        ({"max_completion_tokens": 3}, 400, "invalid_request_error", "max_completion_tokens"),
    ],
)
async def test_invalid_values_name_the_field(
    http, cluster: Cluster, *, change: dict[str, object], status: int, kind: str, name: str
) -> None:
    found, answer = await ask(http, **change)
    assert found == status
    assert answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}
    assert answer["error"]["type"] == kind
    assert answer["error"]["message"].startswith(name)
    assert answer["request_id"]
    assert cluster.prefill.seen == []


async def test_what_is_no_request_is_refused_in_the_same_shape(http, cluster: Cluster) -> None:
    async with http.get("/v1/messages") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["type"] == "error"
    async with http.post("/v1/messages", data=b"{") as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    for path in ("/v1/messages/batches", "/v1/messages/"):
        async with http.get(path) as response:
            answer = await response.json()
        assert response.status == (405 if path.endswith("/") else 404)
        assert (answer["type"], set(answer["error"])) == ("error", {"type", "message"})


def test_every_failure_has_a_type_that_clients_know() -> None:
    kinds = {}
    failures = [error("x") for error in ERRORS_BY_CODE.values()]
    for error in (*failures, TooManyRequestsError("x"), NotReadyError("x"), RequestError("x")):
        failure = failure_from(error)
        told = ANTHROPIC.failure(failure, "req-1")
        kinds[failure.status] = told["error"]["type"]  # type: ignore[index]
    assert kinds == {
        400: "invalid_request_error",
        429: "rate_limit_error",
        500: "api_error",
        502: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }


@pytest.fixture(scope="module")
def plain_model(model_dir: Path) -> ServedModel:
    return load_served_model(ModelSection(path=str(model_dir)))


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
CONTENT = WORDS | st.lists(st.builds(lambda text: {"type": "text", "text": text}, WORDS))


def text_of(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


@given(
    turns=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": CONTENT}),
        min_size=1,
    ),
    system=st.none() | CONTENT,
    stops=st.none() | st.lists(WORDS),
)
def test_a_translation_keeps_every_text_in_its_place(
    plain_model: ServedModel, turns: list[dict], system: str | list | None, stops: list[str] | None
) -> None:
    fields = {"messages": turns, "system": system, "stop_sequences": stops, "max_tokens": 5}
    chat = as_chat(validated(fields, MessagesRequest), plain_model)
    expected = [(turn["role"], text_of(turn["content"])) for turn in turns]
    if system:
        before = text_of(system)
        expected = [("system", before)] * bool(before) + expected
    assert [(m["role"], m["content"]) for m in chat.messages] == expected
    assert chat.stop == (stops or [])
    assert chat.max_tokens == 5
    assert chat.continues_final == (turns[-1]["role"] == "assistant")
