"""What is served here, for clients: the models list, the version, features and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web

from router.backend import Backend
from router.errors import RequestError
from router.http.access.gate import key_of, may_use
from router.http.openai.params import MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS
from router.http.serving import Serving, backend_for
from router.keys.tiers import allowed_tiers
from router.model import ServedModel
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
        """``GET /v1/models``: the models that can be served and that the key may use."""
        tiers = allowed_tiers(self._serving.tiers, key_of(request))
        cards = [
            _card_of(backend, name, tiers)
            for backend in self._serving.backends
            if backend.readiness.was_ready and may_use(request, backend.model.names)
            for name in backend.model.names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{id}``: the model of that name, which may have slashes."""
        name = request.match_info["model"]
        backend = backend_for(self._serving, request, name)
        if not backend.readiness.was_ready:
            raise RequestError(
                f"the model {backend.name!r} is not served yet: "
                f"{', '.join(backend.readiness.missing())}. Fix: retry in a moment",
                param="model",
                code="server_not_ready",
                status=404,
            )
        tiers = allowed_tiers(self._serving.tiers, key_of(request))
        return web.json_response(_card_of(backend, name, tiers))

    async def version(self, request: web.Request) -> web.Response:
        """``GET /version``: this server's, in vLLM's shape."""
        return web.json_response({"version": self._version})

    async def server_info(self, request: web.Request) -> web.Response:
        """``GET /server_info``: what clients may ask for, and how much of it."""
        serving = self._serving
        section = serving.section
        visible = [each for each in serving.backends if may_use(request, each.model.names)]
        backend = backend_for(serving, request, visible[0].name if visible else None)
        limits = backend.limits()
        tiers = allowed_tiers(serving.tiers, key_of(request))
        body = {
            "version": self._version,
            "ready": backend.readiness.was_ready and not backend.readiness.missing(),
            "model": _card_of(backend, backend.name, tiers),
            "models": [_card_of(each, each.name, tiers) for each in visible],
            "vocab_size": limits.vocab_size,
            "eos_token_ids": limits.eos_token_ids,
            "workers": {role.value: len(backend.pool.members(role)) for role in Role},
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


def _card_of(backend: Backend, name: str, tiers: Sequence[str]) -> dict[str, object]:
    """What clients are told of the model under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": backend.model.created,
        "owned_by": "tandem",
        "root": backend.name,
        "max_model_len": backend.limits().max_model_len,
        "tool_parser": _name_of(backend.model.formats.calls, CALL_FORMATS),
        "reasoning_parser": _name_of(backend.model.formats.reasoning, REASONING_FORMATS),
        "service_tiers": list(tiers),
        "features": _features_of(backend.model),
    }


def _features_of(model: ServedModel) -> list[str]:
    """What requests to this model may use; what is not named is refused."""
    features = ["completions", "streaming", "logprobs", "return_token_ids", "tokenize"]
    features += ["generate", "structured_outputs"]
    if model.chat_template is not None:
        features += ["chat", "continue_final_message", "messages", "responses"]
        template, formats = model.tool_template, model.formats
        if template is not None and "tools" in template.variables and formats.calls is not None:
            features += ["tools", "tool_choice_required"]
        if formats.reasoning is not None:
            features.append("reasoning")
    return sorted(features)


def _name_of(found: object, formats: Mapping[str, object]) -> str | None:
    """By which a configuration knows what is ``found``; None: the model has no such format."""
    return next((name for name, fmt in formats.items() if fmt is found), None)
