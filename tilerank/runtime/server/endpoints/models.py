"""What is served: /v1/models and /version."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .service import Service


class ModelEndpoints:
    """Describes the model and the server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        service = self._service
        model = {"id": service.settings.model, "object": "model", "created": service.started, "owned_by": "tilerank"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": service.context_length}]})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": self._service.settings.version})
