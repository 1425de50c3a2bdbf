"""The APIs over HTTP: routes, authentication, and error handlers."""

import hmac

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from tilerank.loader.pooling import DOES
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.errors import UnavailableError
from .apis.audio.speech import SpeechEndpoints, SpeechRequest
from .apis.audio.transcriptions import TranscriptionEndpoints, TranscriptionRequest
from .apis.completions.body import Completion
from .apis.completions.routes import ChatEndpoints
from .apis.health import HealthEndpoints
from .apis.messages.answer import error_body
from .apis.messages.body import CountTokensRequest, MessageRequest
from .apis.messages.routes import MessageEndpoints
from .apis.models import ModelEndpoints
from .apis.pooling.embeddings import EmbeddingEndpoints, EmbeddingRequest
from .apis.pooling.scores import RerankRequest, ScoreEndpoints, ScoreRequest
from .apis.reference import Handler, Operation, ReferenceEndpoints
from .apis.responses.body import ResponseRequest
from .apis.responses.routes import ResponseEndpoints
from .apis.service import ServerSettings, Service
from .apis.tokenize import Detokenize, Tokenize, TokenizeEndpoints
from .chat.request import ChatCompletion
from .http.errors import ApiError, error_response
from .http.form import FORM
from .http.memory import MemoryMiddleware
from .link.client import EngineClient
from .monitoring.request_log import set_route
from .web.pages import PageFiles

IGNORED_HEADER = "X-Ignored-Fields"
"""Names what of a request had no effect because this server does not know it."""


def make_app(client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> Starlette:
    """Return the ASGI application."""
    service = Service(client, tokenizer, settings)
    chat, health = ChatEndpoints(service), HealthEndpoints(service)
    models, tokenize = ModelEndpoints(service), TokenizeEndpoints(service)
    responses, messages = ResponseEndpoints(service), MessageEndpoints(service)
    speech, transcriptions = SpeechEndpoints(service), TranscriptionEndpoints(service)
    embeddings, scores = EmbeddingEndpoints(service), ScoreEndpoints(service)
    operations = [
        Operation("POST", "/v1/chat/completions", chat.chat, ChatCompletion),
        Operation("POST", "/v1/chat/completions/render", chat.render, ChatCompletion),
        Operation("POST", "/v1/completions", chat.complete, Completion),
        Operation("POST", "/v1/responses", responses.create, ResponseRequest),
        Operation("GET", "/v1/responses/{id}", responses.retrieve),
        Operation("DELETE", "/v1/responses/{id}", responses.delete),
        Operation("GET", "/v1/responses/{id}/input_items", responses.input_items),
        Operation("POST", "/v1/responses/{id}/cancel", responses.cancel),
        Operation("POST", "/v1/messages", messages.create, MessageRequest),
        Operation("POST", "/v1/messages/count_tokens", messages.count_tokens, CountTokensRequest),
        Operation("POST", "/v1/audio/speech", speech.speak, SpeechRequest),
        Operation("POST", "/v1/audio/transcriptions", transcriptions.transcribe, TranscriptionRequest, takes=FORM),
    ]
    operations = [one._replace(tasks=("generate",)) for one in operations]
    operations += [
        Operation("POST", "/v1/embeddings", embeddings.embed, EmbeddingRequest, tasks=("embed",)),
        *(
            Operation("POST", path, scores.rerank, RerankRequest, tasks=("embed", "rerank"))
            for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        ),
        *(
            Operation("POST", path, scores.score, ScoreRequest, tasks=("embed", "rerank"))
            for path in ("/v1/score", "/score")
        ),
        Operation("GET", "/v1/models", models.models),
        Operation("GET", "/v1/models/{model:path}", models.model),
        Operation("POST", "/tokenize", tokenize.tokenize, Tokenize),
        Operation("POST", "/detokenize", tokenize.detokenize, Detokenize),
        Operation("GET", "/tokenizer_info", models.tokenizer_info),
        Operation("GET", "/metrics", health.metrics, public=settings.open_metrics),
        Operation("GET", "/status", health.status),
        Operation("GET", "/load", health.load),
        Operation("GET", "/", health.page, public=True),
        Operation("GET", "/status.html", health.status_page, public=True),
        Operation("GET", "/health", health.health, public=True),
        Operation("GET", "/ping", health.health, public=True),
        Operation("GET", "/health_generate", health.health_generate, public=True),
        Operation("GET", "/version", models.version, public=True),
    ]
    reference = ReferenceEndpoints(operations, settings.version, bool(settings.api_keys))
    operations += [
        Operation("GET", "/openapi.json", reference.openapi, public=True),
        Operation("GET", "/docs", reference.page, public=True),
    ]
    routes = [
        Route(one.path, _named(one.path, one.handler if one.public else _guarded(one, settings)), methods=[one.method])
        for one in operations
    ]
    app = Starlette(
        routes=[*routes, Mount("/static", PageFiles())],
        middleware=[Middleware(MemoryMiddleware, memory=service.memory)],
        exception_handlers={
            ApiError: _handle_api_error,
            UnavailableError: _handle_unavailable,
            HTTPException: _handle_http_exception,
            ClientDisconnect: _handle_disconnect,
            Exception: _handle_unexpected,
        },
    )
    app.state.service = service
    app.state.metrics = service.metrics
    app.state.memory = service.memory
    return app


def _guarded(operation: Operation, settings: ServerSettings) -> Handler:
    """Return the handler of an operation behind checks of the API key and of the task of the model."""
    keys, task = [key.encode() for key in settings.api_keys], settings.task

    async def checked(request: Request) -> Response:
        given = _given_key(request).encode()
        # All keys are compared, so that the time does not say which one is right.
        if keys and not sum(hmac.compare_digest(given, key) for key in keys):
            message = "Expected this server's API key as a bearer token, or in the header x-api-key."
            raise ApiError(401, message, code="invalid_api_key")
        if operation.tasks and task not in operation.tasks:
            wanted = " or ".join(DOES[one] for one in operation.tasks)
            message = f"{settings.model} {DOES[task]}; {request.url.path} needs a model that {wanted}."
            raise ApiError(400, message, code="unsupported_endpoint")
        response = await operation.handler(request)
        if ignored := getattr(request.state, "ignored", ()):
            response.headers[IGNORED_HEADER] = ", ".join(ignored)
        return response

    return checked


def _named(path: str, handler: Handler) -> Handler:
    """Return a handler whose requests have the path of their operation in the log."""

    async def named(request: Request) -> Response:
        set_route(request, path)
        return await handler(request)

    return named


def _given_key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.app.state.metrics.count_error(error.status)
    is_message = request.scope["path"].startswith("/v1/messages")  # Anthropic's clients read errors in its form
    return error_response(error, error_body(error) if is_message else None)


async def _handle_unavailable(request: Request, error: Exception) -> Response:
    return await _handle_api_error(request, ApiError(503, str(error), code="unavailable"))


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    """Starlette raises these for unknown paths and methods."""
    assert isinstance(error, HTTPException)
    what = error.detail.capitalize()
    refused = ApiError(error.status_code, f"{what}: {request.method} {request.url.path}.")
    response = await _handle_api_error(request, refused)
    response.headers.update(error.headers or {})  # Allow, for a method that the path does not have
    return response


async def _handle_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # never sent, for the connection is closed


async def _handle_unexpected(request: Request, error: Exception) -> Response:
    return await _handle_api_error(request, ApiError(500, "Internal error. See the server's log."))
