"""Runs texts through an engine that embeds or scores them: what the APIs of vectors and scores have in common."""

import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.events import PooledEvent
from ....protocol.params import PoolingParams, SamplingParams
from ....protocol.prompt import Prompt
from ...chat.deltas import Usage
from ...chat.generation import api_errors
from ...http.errors import ApiError
from ...http.memory import request_memory
from ...link.connection import Progress
from ..answer import json_answer
from ..service import Service, while_connected

MAX_TEXTS = 2048
"""Texts, pairs or documents of a request."""
_AHEAD_TOKENS = 8192
"""Tokens of the texts of a request that run or wait in the engine: enough for its steps, and little enough that other
requests wait for a few steps only."""
_TEXT_TOKENS = 32
"""What a text counts for beside its tokens, in tokens."""
Text = Annotated[str, Field(min_length=1)]
Vector = npt.NDArray[np.float32]


class TextRequest:
    """A request for vectors or scores. prefix: begins its id in the API."""

    def __init__(self, service: Service, request: Request, prefix: str) -> None:
        self.id = f"{prefix}{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.usage = Usage(0)
        self._service = service
        self._request = request

    @property
    def context_length(self) -> int:
        """The most tokens of a text. Raises ApiError if no engine is ready."""
        tokens = self._service.context_length
        if tokens is None:
            raise ApiError(503, "The engine is not ready.", code="engine_gone")
        return tokens

    def limit(self, truncate: int | None) -> int | None:
        """Return to how many tokens texts are cut; None if they are not. truncate: truncate_prompt_tokens."""
        return truncate if truncate is None or truncate > 0 else self.context_length

    async def tokens(
        self, texts: Sequence[str], param: str, *, limit: int | None = None, special: bool = True
    ) -> list[list[int]]:
        """Return the tokens of texts, cut to `limit` tokens with those that the tokenizer appends. special: the
        tokenizer adds its tokens. param: the field that the texts come from."""
        found = await self._service.prompts.encode(texts, special, param)
        for number, ids in enumerate(found):
            if not ids:
                raise ApiError(400, f"{param}: expected texts of at least one token, found none in text {number}")
            if limit is not None and len(ids) > limit:
                end = self._service.tokenizer.appended_ids if special else ()
                found[number] = [*ids[: max(limit - len(end), 0)], *end][:limit]
        return found

    async def values(self, texts: Sequence[list[int]], param: str, dimensions: int = 0) -> list[Vector]:
        """Return the vector of each text, or its score [1]. Raises ApiError. param: the field that texts come from.

        A client that disconnects cancels what is under way.
        """
        longest = max(map(len, texts))
        if longest > self.context_length:
            message = f"{param}: expected at most {self.context_length} tokens a text, found {longest}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        self.usage.prompt_tokens = sum(map(len, texts))
        service, began = self._service, time.monotonic()
        request_memory(self._request).release()
        with while_connected(self._request), service.recent.request(self.id, self.usage) as recent:
            found = await self._run(texts, dimensions)
            recent.end = "stop"
        service.metrics.count_texts([len(ids) for ids in texts], time.monotonic() - began)
        return found

    async def answer(self, values: dict[str, Any], nbytes: int) -> Response:
        """Return the response with a JSON object of about so many bytes, which count as the request's memory. The model
        and the usage are added to it."""
        request_memory(self._request).add_answer(nbytes)
        tokens = self.usage.prompt_tokens
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        return await json_answer({**values, "model": self._service.settings.model, "usage": used}, nbytes)

    async def _run(self, texts: Sequence[list[int]], dimensions: int) -> list[Vector]:
        """Submit the texts in order, and return what becomes of each."""
        client, params = self._service.client, SamplingParams(max_new_tokens=0, pooling=PoolingParams(dimensions))
        under_way: deque[tuple[AsyncGenerator[Progress], int, ExitStack]] = deque()
        found: list[Vector] = []
        ahead = 0

        async def take() -> int:
            stream, tokens, submitted = under_way.popleft()
            with submitted:
                async for event in stream:
                    assert isinstance(event, PooledEvent)
                    found.append(np.frombuffer(event.values, "<f4"))
            return tokens

        with ExitStack() as stack, api_errors():
            client.check_room()
            for ids in texts:
                tokens = len(ids) + _TEXT_TOKENS
                while under_way and ahead + tokens > _AHEAD_TOKENS:
                    ahead -= await take()
                submitted = ExitStack()
                stack.callback(submitted.close)
                (stream,) = submitted.enter_context(client.submit(Prompt(ids), params, [params.seed]))
                under_way.append((stream, tokens, submitted))
                ahead += tokens
            while under_way:
                await take()
        return found


def cosine(one: Vector, other: Vector) -> float:
    """Return the cosine of the angle between two vectors."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))
