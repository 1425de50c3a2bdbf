"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..service import Service, while_connected
from .answer import MessageAnswer
from .body import CountTokensRequest, MessageRequest


class MessageEndpoints:
    """Answers requests in Anthropic's form."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/messages. Answers a conversation in Anthropic's form."""
        service = self._service
        body = await service.body(request, MessageRequest, media=True)
        async with service.turn(request):
            chat = body.chat()
        del body  # it takes much memory
        new_generation = partial(service.generation, chat)
        return await service.answer(request, new_generation, lambda one: MessageAnswer(one, service.settings.model))

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens. Counts the tokens of a conversation."""
        service = self._service
        body = await service.body(request, CountTokensRequest, media=True)
        async with service.turn(request):
            chat = body.chat()
        del body
        with while_connected(request), service.budget.share() as share:
            async with service.prompting(request):
                found = await service.prompt(chat.messages, chat.template, share)
        return JSONResponse({"input_tokens": len(found.prompt.token_ids)})
