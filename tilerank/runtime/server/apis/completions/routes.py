"""OpenAI's /v1/chat/completions and /v1/completions."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ...chat.generation import Generation
from ...chat.messages import Message
from ...chat.request import ChatCompletion, check_voice
from ...chat.sound_formats import check_format
from ...http.errors import ApiError
from ...http.media_budget import Share
from ..answer import Answer, json_response
from ..service import Service, while_connected
from .answer import ChoicesAnswer
from .body import MAX_PROMPTS, Completion
from .choices import ChatFormatter, Formatter, TextFormatter
from .spoken import SpokenFormatter, TranscriptStore


class ChatEndpoints:
    """Answers conversations and plain prompts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._transcripts = TranscriptStore()

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions. Continues texts."""
        service = self._service
        body = await service.body(request, Completion, max_numbers=service.most_numbers(MAX_PROMPTS))

        async def new_generation(share: Share) -> Generation:
            grammar = await service.grammar(body)
            prompts = await service.prompts.from_texts(body.prompt, body.add_special_tokens)
            return await service.generation_of(body, prompts, grammar)

        formatter = TextFormatter(service.tokenizer, body.logprobs, body.return_tokens_as_token_ids)
        return await service.answer(request, new_generation, lambda one: self._answer(one, formatter))

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions. Answers a conversation."""
        service = self._service
        body = await self._conversation(request)
        formatter = self._formatter(body)
        new_generation = partial(service.generation, body)
        return await service.answer(request, new_generation, lambda one: self._answer(one, formatter))

    async def render(self, request: Request) -> Response:
        """POST /v1/chat/completions/render. Returns the tokens of the prompt that a conversation becomes."""
        service = self._service
        body = await self._conversation(request)
        with while_connected(request), service.budget.share() as share:
            async with service.prompting(request):
                generation = await service.generation(body, share, runs=False)
        (token_ids,) = generation.prompts
        id = f"{ChatFormatter.prefix}-{generation.id}"
        return json_response({"request_id": id, "model": service.settings.model, "token_ids": token_ids})

    async def _conversation(self, request: Request) -> ChatCompletion:
        """Read the body of a chat, and give its messages the texts of earlier speeches."""
        settings = self._service.settings
        body = await self._service.body(request, ChatCompletion, media=True)
        if (audio := body.audio) is not None:
            check_voice(audio.voice, settings.voices, settings.model, "audio.voice")
            check_format(audio.format, "audio.format")
        for i, message in enumerate(body.messages):
            self._recall(message, f"messages.{i}.audio.id")
        return body

    def _recall(self, message: Message, where: str) -> None:
        """Give a message that stands for an earlier speech its text. where: the path of its id."""
        if message.audio is None or message.content:
            return
        message.content = message.audio.transcript or self._transcripts.get(message.audio.id)
        if message.content is None:
            text = (
                f"{where}: there is no speech {message.audio.id!r}. The server keeps the texts of "
                f"{self._transcripts.bounds}; send the transcript as content"
            )
            raise ApiError(400, text, param=where, code="audio_not_found")

    def _formatter(self, body: ChatCompletion) -> Formatter:
        tokenizer, top, by_id = self._service.tokenizer, body.alternatives, body.return_tokens_as_token_ids
        if body.audio is None:
            return ChatFormatter(tokenizer, top, by_id)
        return SpokenFormatter(tokenizer, top, by_id, body.audio.format, body.stream, self._transcripts.put)

    def _answer(self, generation: Generation, formatter: Formatter) -> Answer:
        body = generation.body
        usage = body.stream_options is not None and body.stream_options.include_usage
        return ChoicesAnswer(generation, self._service.settings.model, formatter, body.stream, usage)
