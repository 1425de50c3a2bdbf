"""The endpoints that describe the model: /v1/models, /tokenizer_info and /version."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tilerank.loader.errors import TokenizerError

from ..http.errors import ApiError
from .service import Service


class ModelEndpoints:
    """Describes the model and the server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        """GET /v1/models. Lists the model that is served."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._service.settings.models]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}. Describes the model that is served."""
        name = request.path_params["model"]
        self._service.check_model(name)
        return JSONResponse(self._model(name))

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info. Shows the chat template, the special tokens and the size of the vocabulary."""
        tokenizer = self._service.tokenizer
        try:
            template = tokenizer.chat_template.source or None
        except TokenizerError as e:
            raise ApiError(500, f"{self._service.settings.model} has no usable chat template.") from e
        return JSONResponse({**tokenizer.special_tokens, "chat_template": template, "vocab_size": tokenizer.num_tokens})

    async def version(self, request: Request) -> Response:
        """GET /version. Shows the version of tilerank."""
        return JSONResponse({"version": self._service.settings.version})

    def _model(self, name: str) -> dict[str, Any]:
        service = self._service
        voices = {"voices": list(service.settings.voices)} if service.settings.voices else {}
        model = {"id": name, "object": "model", "created": service.started, "owned_by": "tilerank"}
        return model | {"max_model_len": service.context_length} | voices
