"""The OpenAI API over HTTP: routes, authentication, and error handlers. Endpoints are in endpoints/."""

import hmac
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tilerank.loader.tokenizer import Tokenizer

from .answers.message_answer import error_body
from .client import EngineClient
from .endpoints.chat import ChatEndpoints
from .endpoints.health import HealthEndpoints
from .endpoints.messages import MessageEndpoints
from .endpoints.models import ModelEndpoints
from .endpoints.responses import ResponseEndpoints
from .endpoints.service import Service
from .endpoints.tokenize import TokenizeEndpoints
from .errors import ApiError, error_response
from .settings import ServerSettings

Handler = Callable[[Request], Awaitable[Response]]


def make_app(client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> Starlette:
    """Return the ASGI application."""
    service = Service(client, tokenizer, settings)
    chat, health = ChatEndpoints(service), HealthEndpoints(service)
    models, tokenize = ModelEndpoints(service), TokenizeEndpoints(service)
    responses, messages = ResponseEndpoints(service), MessageEndpoints(service)
    guarded: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", chat.chat),
        ("POST", "/v1/completions", chat.complete),
        ("POST", "/v1/responses", responses.create),
        ("GET", "/v1/responses/{id}", responses.retrieve),
        ("DELETE", "/v1/responses/{id}", responses.delete),
        ("POST", "/v1/responses/{id}/cancel", responses.cancel),
        ("POST", "/v1/messages", messages.create),
        ("POST", "/v1/messages/count_tokens", messages.count_tokens),
        ("GET", "/v1/models", models.models),
        ("POST", "/tokenize", tokenize.tokenize),
        ("POST", "/detokenize", tokenize.detokenize),
        ("GET", "/metrics", health.metrics),
        ("GET", "/status", health.status),
    ]
    public: list[tuple[str, str, Handler]] = [
        ("GET", "/", health.page),
        ("GET", "/health", health.health),
        ("GET", "/health_generate", health.health_generate),
        ("GET", "/version", models.version),
    ]
    routes = [Route(path, _guarded(handler, settings.api_key), methods=[method]) for method, path, handler in guarded]
    routes += [Route(path, handler, methods=[method]) for method, path, handler in public]
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _handle_api_error,
            HTTPException: _handle_http_exception,
            ClientDisconnect: _handle_disconnect,
            Exception: _handle_unexpected,
        },
    )
    app.state.metrics = service.metrics
    return app


def _guarded(handler: Handler, key: str | None) -> Handler:
    """Return the handler behind a check of the API key."""

    async def checked(request: Request) -> Response:
        if key is not None and not hmac.compare_digest(_given_key(request).encode(), key.encode()):
            message = "Expected this server's API key as a bearer token, or in the header x-api-key."
            raise ApiError(401, message, code="invalid_api_key")
        return await handler(request)

    return checked


def _given_key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.app.state.metrics.count_error(error.status)
    is_message = request.scope["path"].startswith("/v1/messages")  # Anthropic's clients read errors in its form
    return error_response(error, error_body(error) if is_message else None)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    """Starlette raises these for unknown paths and methods."""
    assert isinstance(error, HTTPException)
    what = error.detail.capitalize()
    refused = ApiError(error.status_code, f"{what}: {request.method} {request.url.path}.")
    return await _handle_api_error(request, refused)


async def _handle_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # never sent, for the connection is closed


async def _handle_unexpected(request: Request, error: Exception) -> Response:
    return await _handle_api_error(request, ApiError(500, "Internal error. See the server's log."))
