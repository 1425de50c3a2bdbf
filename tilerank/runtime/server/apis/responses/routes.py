"""OpenAI's /v1/responses: create, read, cancel and delete."""

import json
from collections.abc import Mapping
from functools import partial
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response

from ...chat.generation import Generation
from ...http.errors import ApiError
from ...http.json_values import MAX_STRUCTURES
from ...http.memory import request_memory
from ..answer import Answer, Json, json_response
from ..service import Service
from .answer import ResponseAnswer
from .body import ResponseRequest
from .input_items import ItemPage
from .items import Item, MessageItem, ReferenceItem
from .store import (
    MAX_MEDIA_BYTES,
    MAX_MEDIA_RESPONSE_BYTES,
    KeptItems,
    ResponseStore,
)
from .tools import called_tools, repeated

_REPEATED = {
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "store",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "user",
}


class ResponseEndpoints:
    """Answers requests in OpenAI's newer form, and keeps the answers for a while."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = (
            ResponseStore()
            if service.settings.media is None
            else ResponseStore(max_bytes=MAX_MEDIA_BYTES, max_response_bytes=MAX_MEDIA_RESPONSE_BYTES)
        )
        self._running: WeakValueDictionary[str, ResponseAnswer] = WeakValueDictionary()

    async def create(self, request: Request) -> Response:
        """POST /v1/responses. Answers a conversation in OpenAI's newer form."""
        service = self._service
        body = await service.body(request, ResponseRequest, media=True)
        before, references = self._before(body), self._referenced(body)
        earlier = [*before, *references.values()]
        if earlier:
            await request_memory(request).hold(sum(kept.parsed_bytes for kept in earlier))
        async with service.turn(request):
            items = _items(body, references)
            kept = (*before, KeptItems.of(items)) if body.store else None
            chat = body.chat([*(item for one in before for item in one.parsed()), *items])
        async with service.turn(request):
            about, tools = self._about(body), called_tools(body.tools)
            summary = body.reasoning.summary is not None
        del body, items, earlier, before, references  # they take much memory

        def on_end(response: Json) -> None:
            if kept is not None:
                self._store.put(response, kept)

        def new_answer(generation: Generation) -> Answer:
            answer = ResponseAnswer(generation, about, tools, summary, on_end)
            self._running[answer.id] = answer
            return answer

        return await service.answer(request, partial(service.generation, chat), new_answer, _repeated_bytes(about))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/responses/{id}. Returns a stored response."""
        if names := request.query_params.keys() - {"include"}:
            raise ApiError(400, f"Unsupported parameter: '{min(names)}'.", param=min(names))
        id = request.path_params["id"]
        stored = self._store.get(id)
        if stored is not None:
            return Response(stored.data, media_type="application/json")
        return json_response(self._find_running(id).response)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}. Forgets a stored response."""
        id = request.path_params["id"]
        if not self._store.delete(id):
            raise self._gone(id, 404, None)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel. Ends a response that is being streamed."""
        id = request.path_params["id"]
        stored = self._store.get(id)
        if stored is not None:
            raise ApiError(400, f"The response {id} cannot be cancelled: it is {stored.status}.")
        running = self._find_running(id)
        running.cancel()
        return json_response(running.response | {"status": "cancelled"})

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items. Lists the items of the conversation before a stored response."""
        page = ItemPage.of(request.query_params)
        id = request.path_params["id"]
        stored = self._store.get(id)
        if stored is None:
            raise self._gone(id, 404, None)
        await request_memory(request).hold(sum(kept.parsed_bytes for kept in stored.before))
        async with self._service.turn(request):
            return json_response(page.of_items([item for kept in stored.before for item in kept.parsed()]))

    def _find_running(self, id: str) -> ResponseAnswer:
        running = self._running.get(id)
        if running is None:
            raise self._gone(id, 404, None)
        return running

    def _gone(self, id: str, status: int, param: str | None) -> ApiError:
        return ApiError(
            status,
            f"There is no response {id!r}. It was never stored, or was deleted, or newer ones took its place: the "
            f"server keeps {self._store.bounds}, and none of an earlier start.",
            param=param,
            code="response_not_found" if param is None else "previous_response_not_found",
        )

    def _before(self, body: ResponseRequest) -> tuple[KeptItems, ...]:
        """Return the items of the response that a request continues."""
        if body.previous_response_id is None:
            return ()
        stored = self._store.get(body.previous_response_id)
        if stored is None:
            raise self._gone(body.previous_response_id, 400, "previous_response_id")
        return stored.conversation

    def _referenced(self, body: ResponseRequest) -> dict[str, KeptItems]:
        """Return the items to which a request refers, each under its id. All references together are bounded like one
        response."""
        found: dict[str, KeptItems] = {}
        nbytes = structures = 0
        for i, item in enumerate(body.input if isinstance(body.input, list) else ()):
            if not isinstance(item, ReferenceItem):
                continue
            kept = found[item.id] = found.get(item.id) or self._item(item.id, i)
            nbytes += len(kept.data)
            structures += kept.values.structures
            if nbytes > self._store.max_response_bytes or structures > MAX_STRUCTURES:
                message = (
                    f"input.{i}: the items of all references may have {self._store.max_response_bytes >> 20} MiB and "
                    f"{MAX_STRUCTURES:,} strings, objects and lists together"
                )
                raise ApiError(413, message, param=f"input.{i}")
        return found

    def _item(self, id: str, index: int) -> KeptItems:
        found = self._store.item(id)
        if found is None:
            message = (
                f"input.{index}.id: there is no item {id!r}. The server keeps the items of {self._store.bounds}; send "
                "the item itself, with store: false if a client library makes the references."
            )
            raise ApiError(400, message, param=f"input.{index}.id", code="item_not_found")
        return found

    def _about(self, body: ResponseRequest) -> Json:
        """Return the fields of the response that repeat the request, with the values that were used."""
        sampling, given = self._service.settings.sampling, body.sampling
        about = body.model_dump(include=_REPEATED)
        about["tools"] = [repeated(tool) for tool in body.tools]
        return about | {
            "model": self._service.settings.model,
            "max_tool_calls": None,
            "reasoning": body.reasoning.model_dump(),
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "temperature": given.get("temperature", sampling.temperature),
            "top_p": given.get("top_p", sampling.top_p),
            "service_tier": "default",
        }


def _items(body: ResponseRequest, references: Mapping[str, KeptItems]) -> list[Item]:
    """Return the items of a request, each reference replaced by the item of its id."""
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    parsed = {id: kept.parsed()[0] for id, kept in references.items()}
    return [parsed[item.id] if isinstance(item, ReferenceItem) else item for item in body.input]


def _repeated_bytes(about: Json) -> int:
    """Return the bytes that the answer takes of what it repeats of its request."""
    return 4 * len(json.dumps([about["instructions"], about["tools"]]))
