"""Text to tokens and back: /tokenize and /detokenize."""

from typing import Annotated

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from ..chat.fields import ListOf, RequestBody
from ..chat.messages import Message, check_arguments
from ..chat.request import MAX_TOKENS, TemplateOptions, TemplateRequest, TemplateVariables, TokenId
from ..chat.tool_fields import Tool
from ..http.errors import ApiError
from .answer import json_response
from .service import Service, while_connected


class Tokenize(RequestBody):
    """POST /tokenize: a prompt, or messages for the chat template.

    add_special_tokens: by default those of a prompt, and none with messages.
    """

    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    messages: Annotated[ListOf[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: ListOf[Tool] = Field([], max_length=128)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables = Field({})

    @model_validator(mode="after")
    def _check_input(self) -> "Tokenize":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        check_arguments(self.messages or ())
        return self

    @property
    def template(self) -> TemplateRequest:
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools] or None
        options = TemplateOptions(
            self.add_generation_prompt, self.continue_final_message, bool(self.add_special_tokens)
        )
        return TemplateRequest(self.chat_template_kwargs, None, tools, options)


class Detokenize(RequestBody):
    """POST /detokenize."""

    model: str | None = Field(None, max_length=1024)
    tokens: ListOf[TokenId] = Field(max_length=MAX_TOKENS)


class TokenizeEndpoints:
    """Shows the tokens of texts and conversations."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize. Returns the tokens of a text or a conversation."""
        service = self._service
        body = await service.body(request, Tokenize, media=True)
        if body.messages is not None:
            with while_connected(request), service.budget.share() as share:
                async with service.prompting(request):
                    found = await service.prompt(body.messages, body.template, share)
            tokens = found.prompt.token_ids
        else:
            assert body.prompt is not None
            async with service.prompting(request):
                [tokens] = await service.prompts.encode([body.prompt], body.add_special_tokens is not False, "prompt")
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.context_length})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize. Returns the text of tokens."""
        service = self._service
        body = await service.body(request, Detokenize, max_numbers=service.most_numbers(1))
        known, context, count = service.tokenizer.num_tokens, service.context_length, len(body.tokens)
        if context is not None and count > context:
            message = f"tokens: expected at most {context} token ids, the context length, found {count}"
            raise ApiError(400, message, param="tokens", code="context_length_exceeded")
        if (last := max(body.tokens, default=0)) >= known:
            raise ApiError(400, f"expected token ids below {known}, found {last}", param="tokens")
        return json_response({"prompt": service.tokenizer.decode(body.tokens)})
