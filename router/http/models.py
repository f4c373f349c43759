"""What is served here: the models list."""

from __future__ import annotations

from aiohttp import web

from router.errors import RequestError
from router.http.endpoints import Serving, check_model


class ModelEndpoints:
    """Handlers of ``/v1/models``."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``: nothing until it can be served."""
        cards = [self._model_card()] if self._serving.readiness.was_ready else []
        return web.json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{id}``; ids contain slashes."""
        check_model(self._serving, request.match_info["model"])
        if not self._serving.readiness.was_ready:
            raise RequestError(
                f"the model {self._serving.model.name!r} is not served yet: "
                f"{', '.join(self._serving.readiness.missing())}. Fix: retry in a moment",
                param="model",
                code="server_not_ready",
                status=404,
            )
        return web.json_response(self._model_card())

    def _model_card(self) -> dict[str, object]:
        serving = self._serving
        return {
            "id": serving.model.name,
            "object": "model",
            "created": serving.model.created,
            "owned_by": "tandem",
            "max_model_len": serving.limits().max_model_len,
        }
