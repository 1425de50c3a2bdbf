"""Endpoints of health and load: /health, /health_generate, /metrics, /status, the chat and the status page."""

import asyncio
import time
from contextlib import aclosing

import prometheus_client
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ...protocol.params import PoolingParams, SamplingParams
from ...protocol.prompt import Prompt
from ..http.errors import ApiError
from ..link.connection import EngineGoneError, RefusedError
from ..monitoring import status
from ..web.pages import page
from .service import Service, while_connected


class HealthEndpoints:
    """Shows the state of the engine and of the requests."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._began = time.monotonic()
        self._probe: asyncio.Task[None] | None = None  # of /health_generate, shared by all who ask while it runs

    async def health(self, request: Request) -> Response:
        """GET /health, GET /ping. Fails while no engine is ready."""
        if self._service.client.state is None:
            raise ApiError(503, "The engine is not ready.", code="engine_gone")
        return Response()

    async def health_generate(self, request: Request) -> Response:
        """GET /health_generate. Generates one token, or embeds or scores a text of one, which involves every rank."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._generate())
            self._probe.add_done_callback(_mark_retrieved)
        try:
            with while_connected(request):
                await asyncio.shield(self._probe)
        except EngineGoneError as e:
            raise ApiError(503, str(e), code="engine_gone") from e
        except RefusedError as e:
            raise ApiError(500, str(e)) from e
        return Response()

    async def _generate(self) -> None:
        params = SamplingParams(max_new_tokens=1)
        if self._service.settings.pooling is not None:
            params = SamplingParams(max_new_tokens=0, pooling=PoolingParams())
        async with aclosing(self._service.client.generate(Prompt([0]), params)) as tokens:
            async for _ in tokens:
                pass

    async def load(self, request: Request) -> Response:
        """GET /load. Counts the requests that run and wait, for load balancers."""
        state = self._service.client.state
        if state is None:
            raise ApiError(503, "The engine is not ready.", code="engine_gone")
        used = {"running": state.running, "waiting": state.waiting, "kv_cache_usage": state.cache_used}
        return JSONResponse({"server_load": state.running + state.waiting} | used)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics. Counts and times in Prometheus' format."""
        return PlainTextResponse(self._service.metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def status(self, request: Request) -> Response:
        """GET /status. What the status page shows."""
        settings = self._service.settings
        about = {
            "model": settings.model,
            "version": settings.version,
            "weights": settings.weights,
            "takes": [] if settings.media is None else list(settings.media.processor.kinds),
            "uptime_s": time.monotonic() - self._began,
        }
        service = self._service
        return JSONResponse(status.status_json(service.client, service.recent, service.metrics, about))

    async def page(self, request: Request) -> Response:
        """GET /. The chat, or the status page of a model that generates no text."""
        return page("chat" if self._service.settings.task == "generate" else "status")

    async def status_page(self, request: Request) -> Response:
        """GET /status.html. The status page."""
        return page("status")


def _mark_retrieved(probe: "asyncio.Task[None]") -> None:
    """Keep asyncio from logging the error of a probe whose askers have all left."""
    if not probe.cancelled():
        probe.exception()
