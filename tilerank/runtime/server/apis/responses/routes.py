"""OpenAI's /v1/responses: create, read, cancel and delete."""

import json
from functools import partial
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...chat.generation import Generation
from ...http.errors import ApiError
from ..answer import Answer, Json
from ..service import Service
from .answer import ResponseAnswer
from .body import ResponseRequest
from .items import ITEMS, Item, MessageItem, ReferenceItem
from .store import MAX_RESPONSE_BYTES, ResponseStore

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
        self._store = ResponseStore()
        self._running: WeakValueDictionary[str, ResponseAnswer] = WeakValueDictionary()

    async def create(self, request: Request) -> Response:
        """POST /v1/responses. Answers a conversation in OpenAI's newer form."""
        service = self._service
        body = await service.body(request, ResponseRequest, media=True)
        items = self._conversation(body)
        chat = body.chat(items)
        kept = _encoded(items) if body.store else None
        body.input = ""  # pictures take much memory
        items.clear()
        about, summary = self._about(body), body.reasoning.summary is not None

        def on_end(response: Json) -> None:
            if kept is not None:
                self._store.put(response, kept)

        def new_answer(generation: Generation) -> Answer:
            answer = ResponseAnswer(generation, about, summary, on_end)
            self._running[answer.id] = answer
            return answer

        return await service.answer(request, partial(service.generation, chat), new_answer)

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/responses/{id}. Returns a stored response."""
        if names := request.query_params.keys() - {"include"}:
            raise ApiError(400, f"Unsupported parameter: '{min(names)}'.", param=min(names))
        return JSONResponse(self._find(request.path_params["id"]))

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}. Forgets a stored response."""
        id = request.path_params["id"]
        if not self._store.delete(id):
            raise self._gone(id, 404, None)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel. Ends a response that is being streamed."""
        id = request.path_params["id"]
        response = self._find(id)
        if response["status"] != "in_progress":
            raise ApiError(400, f"The response {id} cannot be cancelled: it is {response['status']}.")
        self._running[id].cancel()
        return JSONResponse(response | {"status": "cancelled"})

    def _find(self, id: str) -> Json:
        stored = self._store.get(id)
        if stored is not None:
            found: Json = json.loads(stored.response)
            return found
        running = self._running.get(id)
        if running is None:
            raise self._gone(id, 404, None)
        return running.response

    def _gone(self, id: str, status: int, param: str | None) -> ApiError:
        return ApiError(
            status,
            f"There is no response {id!r}. It was never stored, or was deleted, or newer ones took its place: the "
            f"server keeps {self._store.bounds}, and none of an earlier start.",
            param=param,
            code="response_not_found" if param is None else "previous_response_not_found",
        )

    def _conversation(self, body: ResponseRequest) -> list[Item]:
        """Return the items of the whole conversation, without references."""
        items: list[Item] = []
        if body.previous_response_id is not None:
            stored = self._store.get(body.previous_response_id)
            if stored is None:
                raise self._gone(body.previous_response_id, 400, "previous_response_id")
            items += ITEMS.validate_python(stored.conversation)
        if isinstance(body.input, str):
            return [*items, MessageItem(role="user", content=body.input)]
        for i, item in enumerate(body.input):
            items.append(self._referenced(item.id, i) if isinstance(item, ReferenceItem) else item)
        return items

    def _referenced(self, id: str, index: int) -> Item:
        found = self._store.item(id)
        if found is None:
            message = (
                f"input.{index}.id: there is no item {id!r}. The server keeps the items of {self._store.bounds}; send "
                "the item itself, with store: false if a client library makes the references."
            )
            raise ApiError(400, message, param=f"input.{index}.id", code="item_not_found")
        return ITEMS.validate_python([found])[0]

    def _about(self, body: ResponseRequest) -> Json:
        """Return the fields of the response that repeat the request, with the values that were used."""
        sampling, given = self._service.settings.sampling, body.sampling
        about = body.model_dump(include=_REPEATED)
        about["tools"] = [{"description": None, "parameters": None, "strict": None} | tool for tool in about["tools"]]
        return about | {
            "model": self._service.settings.model,
            "max_tool_calls": None,
            "reasoning": body.reasoning.model_dump(),
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "temperature": given.get("temperature", sampling.temperature),
            "top_p": given.get("top_p", sampling.top_p),
            "service_tier": "default",
        }


def _encoded(items: list[Item]) -> bytes | None:
    """Return the items as JSON for the store; None if they are too long for it."""
    data = ITEMS.dump_json(items, exclude_none=True, by_alias=True)
    return data if len(data) <= MAX_RESPONSE_BYTES else None
