"""Text to tokens and back: /tokenize and /detokenize."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..chat.request import Detokenize, Tokenize
from ..http.errors import ApiError
from .service import Service, while_connected


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
                variables, tools, options = body.chat_template_kwargs, body.template_tools(), body.template_options
                build = service.prompts.from_messages(body.messages, variables, None, tools, share, options)
                tokens = (await build).prompt.token_ids
        else:
            assert body.prompt is not None
            tokens = await service.prompts.encode(body.prompt, body.add_special_tokens is not False)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.context_length})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize. Returns the text of tokens."""
        body = await self._service.body(request, Detokenize)
        known = self._service.tokenizer.num_tokens
        if any(token >= known for token in body.tokens):
            raise ApiError(400, f"expected token ids below {known}, found {max(body.tokens)}", param="tokens")
        return JSONResponse({"prompt": self._service.tokenizer.decode(body.tokens)})
