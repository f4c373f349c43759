"""What is served here, for clients: the models list, the version, features and limits."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from router.errors import RequestError
from router.http.endpoints import Serving, check_model
from router.http.gate import may_use
from router.http.params import MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS
from router.pool.members import Role
from router.text.calls.formats import CALL_FORMATS
from router.text.reasoning import REASONING_FORMATS
from runtime.version import installed_version

UNKNOWN_VERSION = "0+unknown"
"""Of a source tree that is not installed; a version by PEP 440."""


class ModelEndpoints:
    """Handlers of ``/v1/models``, ``/version`` and ``/server_info``."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._version = installed_version() or UNKNOWN_VERSION

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``: the model, once it can be served."""
        serving = self._serving
        is_there = serving.readiness.was_ready and may_use(request, serving.model.name)
        cards = [self._model_card()] if is_there else []
        return web.json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{id}``: the model, whose name may have slashes."""
        check_model(self._serving, request.match_info["model"])
        self._serving.gate.check_model(request, self._serving.model.name)
        if not self._serving.readiness.was_ready:
            raise RequestError(
                f"the model {self._serving.model.name!r} is not served yet: "
                f"{', '.join(self._serving.readiness.missing())}. Fix: retry in a moment",
                param="model",
                code="server_not_ready",
                status=404,
            )
        return web.json_response(self._model_card())

    async def version(self, request: web.Request) -> web.Response:
        """``GET /version``: this server's, in vLLM's shape."""
        return web.json_response({"version": self._version})

    async def server_info(self, request: web.Request) -> web.Response:
        """``GET /server_info``: what clients may ask for, and how much of it."""
        serving = self._serving
        serving.gate.check_model(request, serving.model.name)
        section = serving.section
        body = {
            "version": self._version,
            "ready": serving.readiness.was_ready and not serving.readiness.missing(),
            "model": self._model_card(),
            "vocab_size": serving.limits().vocab_size,
            "eos_token_ids": serving.limits().eos_token_ids,
            "workers": {role.value: len(serving.pool.members(role)) for role in Role},
            "limits": {
                "max_body_bytes": section.max_body_bytes,
                "max_choices_per_request": section.max_choices_per_request,
                "n": MAX_CHOICES,
                "stop": MAX_STOPS,
                "top_logprobs": MAX_LOGPROBS,
                "queue_timeout_s": section.queue_timeout_s,
                "first_token_timeout_s": section.first_token_timeout_s,
                "request_timeout_s": section.request_timeout_s,
            },
        }
        return web.json_response(body)

    def _model_card(self) -> dict[str, object]:
        serving = self._serving
        return {
            "id": serving.model.name,
            "object": "model",
            "created": serving.model.created,
            "owned_by": "tandem",
            "max_model_len": serving.limits().max_model_len,
            "tool_parser": _name_of(serving.model.formats.calls, CALL_FORMATS),
            "reasoning_parser": _name_of(serving.model.formats.reasoning, REASONING_FORMATS),
            "service_tiers": list(serving.tiers.names),
            "features": self._features(),
        }

    def _features(self) -> list[str]:
        """What requests to this model may use; what is not named is refused."""
        features = ["completions", "streaming", "logprobs", "return_token_ids", "tokenize"]
        features.append("generate")
        model = self._serving.model
        if model.chat_template is not None:
            features += ["chat", "continue_final_message", "messages", "responses"]
            template, formats = model.tool_template, model.formats
            if template is not None and "tools" in template.variables and formats.calls is not None:
                features.append("tools")
            if formats.reasoning is not None:
                features.append("reasoning")
        return sorted(features)


def _name_of(found: object, formats: Mapping[str, object]) -> str | None:
    """By which a configuration knows what is ``found``; None: the model has no such format."""
    return next((name for name, fmt in formats.items() if fmt is found), None)
