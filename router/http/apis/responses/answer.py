"""A response object of ``/v1/responses`` and its output items."""

from __future__ import annotations

import time

import orjson

from router.http.apis.blocks import Block, BlockKind, Blocks
from router.http.apis.responses.request import ResponsesRequest
from router.http.errors import Failure
from router.http.openai.logprobs import chat_logprobs
from router.http.openai.response import Choice, Json, ResponseInfo
from router.text.output import Piece
from runtime.pb import prefill_pb2

_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
IN_PROGRESS = "in_progress"


class Answer:
    """What every event and body of one response is made of."""

    def __init__(self, request: ResponsesRequest, info: ResponseInfo) -> None:
        self._request = request
        self._info = info
        self._id = info.response_id.removeprefix("chatcmpl-")
        self._logprobs: dict[int, list[Json]] = {}
        """Of the tokens of each text."""
        self.blocks = Blocks()

    @property
    def wants_logprobs(self) -> bool:
        """Whether texts carry those of their tokens."""
        return self._info.wants_logprobs

    def logprobs(self, piece: Piece) -> list[Json]:
        """Those of one piece's tokens, kept for the text that it belongs to."""
        if not (self.wants_logprobs and piece.text):
            return []
        content = chat_logprobs(self._info.vocabulary, piece.token_ids, piece.logprobs)["content"]
        assert isinstance(content, list)
        texts = [block for block in self.blocks.found if block.kind is BlockKind.TEXT]
        self._logprobs.setdefault(texts[-1].index if texts else 0, []).extend(content)
        return content

    def item_id(self, block: Block) -> str:
        """Of a block's item."""
        return f"{_PREFIXES[block.kind]}_{self._id}.{block.index}"

    def item(self, block: Block, status: str | None = None) -> Json:
        """The item of ``block``: as it is, or while it begins without its text."""
        begins = status == IN_PROGRESS
        status = status or ("completed" if block.is_whole else "incomplete")
        head: Json = {"id": self.item_id(block), "status": status}
        if block.kind is BlockKind.CALL:
            return {
                **head,
                "type": "function_call",
                "call_id": block.call_id or f"call_{self._id}.{block.index}",
                "name": block.name,
                "arguments": block.text,
            }
        content = [] if begins else [self.part(block)]
        if block.kind is BlockKind.REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def part(self, block: Block) -> Json:
        """The one part of a block's item."""
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": block.text}
        logprobs = self._logprobs.get(block.index, [])
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": logprobs,
        }

    def response(self, status: str, failure: Failure | None = None) -> Json:
        """The response object; its output and usage only once it has ended."""
        request, reasoning = self._request, self._request.reasoning
        has_ended = status != IN_PROGRESS
        text = {"type": "text"} if request.text is None else request.text.format
        tools = [{"type": "function", **_function(tool)} for tool in request.tools or []]
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._info.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None if failure is None else _error(failure),
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "model": self._info.model,
            "output": [self.item(block) for block in self.blocks.found] if has_ended else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None,
            },
            "safety_identifier": request.safety_identifier,
            "service_tier": self._info.service_tier or "default",
            "background": False,
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": _choice_of(request),
            "tools": tools,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self._usage() if has_ended else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }

    def final(self) -> Json:
        """The response when all of the output is there."""
        if self.blocks.finish_reason == "length":
            return self.response("incomplete")
        return self.response("completed")

    def _usage(self) -> Json:
        (choice,) = self._info.choices
        num_input, num_output = len(choice.prompt.token_ids), choice.text.num_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": choice.generation.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": choice.text.num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }


def _function(tool: Json) -> Json:
    """A tool's function, with the fields that clients expect to be there."""
    function = tool["function"]
    assert isinstance(function, dict)
    return {"parameters": None, "strict": False, **function}


def _choice_of(request: ResponsesRequest) -> object:
    choice = request.tool_choice
    if not isinstance(choice, dict):
        return choice or "auto"
    if choice["type"] == "allowed_tools":
        allowed = choice["allowed_tools"]
        assert isinstance(allowed, dict)
        tools = [{"type": "function", **tool["function"]} for tool in allowed["tools"]]
        return {"type": "allowed_tools", "mode": allowed["mode"], "tools": tools}
    function = choice["function"]
    assert isinstance(function, dict)
    return {"type": "function", **function}


def _error(failure: Failure) -> Json:
    """As a response carries it, whose codes are few."""
    code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
    return {"code": code, "message": failure.message}


class ResponseBody:
    """A ``ResponseFormat`` of one JSON body."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """Nothing yet."""
        return b""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Nothing yet."""
        for _ in self._answer.blocks.add(piece):
            pass
        self._answer.logprobs(piece)
        return b""

    def closing(self) -> bytes:
        """The response."""
        return orjson.dumps(self._answer.final())
