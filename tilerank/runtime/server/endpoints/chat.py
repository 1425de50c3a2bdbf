"""OpenAI's /v1/chat/completions and /v1/completions."""

from starlette.requests import Request
from starlette.responses import Response

from ..answers.answer import Answer
from ..answers.choices import ChoicesAnswer
from ..answers.completions import ActiveRequest
from ..answers.responses import ChatFormatter, Formatter, TextFormatter
from ..api import ChatCompletion, Completion, Sampling
from .generation import NewParser, activate, begin, checked_grammar, converse, finish
from .service import Service


class ChatEndpoints:
    """Answers conversations and plain prompts."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions. Continues texts."""
        service = self._service
        body = await service.body(request, Completion)
        grammar = await checked_grammar(service, body, None)
        prompts = await service.prompts.from_texts(body.prompt, body.add_special_tokens)
        active = activate(service, body, prompts, body.logprobs, grammar)
        formatter = TextFormatter(service.tokenizer, body.logprobs, body.return_tokens_as_token_ids)
        answer = self._answer(active, body, formatter)
        return await finish(request, await begin(service, request, active, answer), body.stream)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions. Answers a conversation."""
        service = self._service
        body = await service.body(request, ChatCompletion, media=True)

        def new_answer(active: ActiveRequest, new_parser: NewParser | None) -> Answer:
            by_id = body.return_tokens_as_token_ids
            return self._answer(active, body, ChatFormatter(service.tokenizer, body.alternatives, new_parser, by_id))

        return await converse(service, request, body, new_answer)

    def _answer(self, active: ActiveRequest, body: Sampling, formatter: Formatter) -> ChoicesAnswer:
        usage = body.stream_options is not None and body.stream_options.include_usage
        return ChoicesAnswer(active, self._service.settings.model, formatter, body.stream, usage)
