"""OpenAI's /v1/chat/completions and /v1/completions."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ..answers.responses import ChatFormatter, TextFormatter
from ..api import ChatCompletion, Completion
from ..errors import ApiError
from .generation import answer, begin, checked_grammar
from .service import Service, until_disconnect


class ChatEndpoints:
    """Answers conversations and plain prompts."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        service = self._service
        body = await service.body(request, Completion)
        formatter = TextFormatter(service.tokenizer, body.logprobs)
        grammar = await checked_grammar(service, body, None)
        prompts = await service.prompts.from_texts(body.prompt)
        begun = await begin(service, request, body, prompts, body.logprobs, grammar, formatter)
        return await answer(request, body, begun, formatter)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        service, settings = self._service, self._service.settings
        body = await service.body(request, ChatCompletion)
        tools = body.template_tools()
        if tools and settings.tool_parser is None:
            raise ApiError(400, f"tools: the format of tool calls of {settings.model} is unknown", param="tools")
        top = body.top_logprobs or 0 if body.logprobs else None
        parser = settings.tool_parser if tools else None
        schemas = {tool.function.name: tool.function.parameters or {} for tool in body.callable_tools}
        formatter = ChatFormatter(service.tokenizer, top, partial(parser, schemas) if parser else None)
        variables, effort = body.chat_template_kwargs, body.reasoning_effort
        with service.budget.share() as share:
            build = service.prompts.from_messages(body.messages, variables, effort, tools, share)
            prompt, thinking = await until_disconnect(request, build)
            prompts = [prompt]
            del prompt  # pictures take much memory, and the client frees them once they are sent
            grammar = await checked_grammar(service, body, parser, thinking)
            begun = await begin(service, request, body, prompts, top, grammar, formatter, thinking)
        return await answer(request, body, begun, formatter)
