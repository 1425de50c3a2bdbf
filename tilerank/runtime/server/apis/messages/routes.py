"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...chat.deltas import ActiveRequest
from ..answer import Answer
from ..generation import NewParser, conversation_prompt, converse
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
        chat = body.chat()
        body.messages.clear()  # pictures take much memory

        def new_answer(active: ActiveRequest, new_parser: NewParser | None) -> Answer:
            return MessageAnswer(active, service.settings.model, new_parser() if new_parser else None)

        return await converse(service, request, chat, new_answer)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens. Counts the tokens of a conversation."""
        service = self._service
        body = await service.body(request, CountTokensRequest, media=True)
        chat = body.chat()
        body.messages.clear()
        with while_connected(request), service.budget.share() as share:
            found = await conversation_prompt(service, chat, share)
        return JSONResponse({"input_tokens": len(found.prompt.token_ids)})
