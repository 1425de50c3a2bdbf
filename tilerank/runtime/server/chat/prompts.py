"""Builds the prompts of requests: text and messages in, token ids and media out."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

from ...media.decoder import DecodedMedium
from ...media.messages import MediaSource, split_media
from ...media.processor import Processor
from ...protocol.errors import MediaError
from ...protocol.prompt import Prompt
from ..http.errors import ApiError
from .messages import Message, TextPart
from .reasoning import BEGIN, END, ReasoningStart, thinking_after
from .rendering import Renderer
from .request import ReasoningEffort, TemplateOptions, TemplateRequest
from .tools.format import ToolFormat

LONG_TEXT = 4096
"""Characters. Texts of this length or more are tokenised in a thread, so that other requests do not wait."""
LONG_TEXTS = 2
"""How many of them are tokenised at once, because each takes hundreds of bytes of memory for a character."""
_RESERVED = {"self", "messages", "tools", "add_generation_prompt"}
_SWITCHES = ("enable_thinking", "thinking")
"""The variable that turns reasoning on and off has one of these names: Qwen's or DeepSeek's."""
_EFFORT = "reasoning_effort"
ReadMedia = Callable[[Sequence[MediaSource]], Awaitable[list[DecodedMedium]]]
"""Returns the media of a conversation, decoded. Raises MediaError, or an error of its own."""


class ChatPrompt(NamedTuple):
    """The prompt of a conversation. thinking: how the answer to it begins."""

    prompt: Prompt
    thinking: ReasoningStart


class PromptBuilder:
    """Builds prompts for one model: those of the HTTP server and of `tilerank generate`. Its methods raise ApiError.

    model: its name in messages. format: of the model's tool calls. processor: of pictures, videos and sound; None for a
    model that reads text only. renderer: of chat templates. context_length: returns the most tokens of a prompt; None
    if they are not known yet.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        format: ToolFormat | None,
        processor: Processor | None,
        renderer: Renderer,
        context_length: Callable[[], int | None],
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._format = format
        self._processor = processor
        self._renderer = renderer
        self._context_length = context_length
        self._long_texts = asyncio.Semaphore(LONG_TEXTS)

    async def from_texts(
        self, prompt: str | list[str] | list[int] | list[list[int]], add_special_tokens: bool = True
    ) -> list[Prompt]:
        """Return the prompts of /v1/completions."""
        if isinstance(prompt, str):
            prompts = [await self.encode(prompt, add_special_tokens, "prompt")]
        elif isinstance(prompt[0], int):
            prompts = [[token for token in prompt if isinstance(token, int)]]
        else:
            prompts = [
                await self.encode(one, add_special_tokens, "prompt") if isinstance(one, str) else one for one in prompt
            ]
        if not all(prompts):
            raise ApiError(400, "The prompt is empty; expected at least one token.", param="prompt")
        if self._processor is None:
            return [Prompt(ids) for ids in prompts]
        try:
            return [self._processor.text_prompt(ids) for ids in prompts]
        except MediaError as e:
            raise ApiError(400, f"prompt: {e}", param="prompt") from e

    async def from_messages(self, messages: list[Message], request: TemplateRequest, read: ReadMedia) -> ChatPrompt:
        """Return the prompt of a conversation. Empties `messages`, because media in data: URLs take much memory.

        Raises MediaError and TokenizerError as well, for media and text that cannot be used.
        """
        options, processor = request.options, self._processor
        if processor is None:
            _refuse_media(messages, self._model)
            plain = [message.for_template(parts=False) for message in messages]
            text = await self._render(plain, request)
            # Templates print the begin-of-text token themselves where the model needs it.
            ids = await self.encode(text, options.add_special_tokens, "messages")
            return ChatPrompt(Prompt(ids), self._thinking(text, options))
        if options.add_special_tokens:
            message = "add_special_tokens: chats of a model that takes pictures have those of the template alone"
            raise ApiError(400, message, param="add_special_tokens")
        plain, sources = split_media(
            [message.for_template(parts=True) for message in messages], processor.placeholders, options.hears_videos
        )
        messages.clear()
        text = await self._render(plain, request)
        self._check_length(text, "messages")
        media = await read(sources)
        async with self._long_texts if len(text) >= LONG_TEXT else nullcontext():
            prompt = await asyncio.to_thread(_with_digests, processor, text, media)
        return ChatPrompt(prompt, self._thinking(text, options))

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Return the token ids of a text. param: the field of the request that it comes from."""
        self._check_length(text, param)
        try:
            if len(text) < LONG_TEXT:
                return self._tokenizer.encode(text, add_special_tokens)
            async with self._long_texts:
                return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens)
        except TokenizerError as e:
            raise ApiError(400, str(e)) from e

    def _check_length(self, text: str, param: str) -> None:
        """Raise ApiError if a text cannot fit into the context, before it is tokenised."""
        tokens, longest = self._context_length(), self._tokenizer.longest_token
        if tokens is not None and len(text) > tokens * longest:
            message = (
                f"{param}: expected at most {tokens * longest} characters, as many as the {tokens} tokens of the "
                f"context have at most, found {len(text)}"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def _thinking(self, text: str, options: TemplateOptions) -> ReasoningStart:
        """Return how the answer begins. A message that is continued may end within its reasoning."""
        if not options.continue_final_message:
            return thinking_after(text, self._tokenizer)
        return ReasoningStart.OPENED if text.rfind(BEGIN) > text.rfind(END) else ReasoningStart.NEVER

    async def _render(self, messages: Sequence[dict[str, Any]], request: TemplateRequest) -> str:
        variables, effort, tools, options = request
        reserved = _RESERVED & variables.keys()
        if reserved:
            raise ApiError(400, f"chat_template_kwargs: {min(reserved)} cannot be set", param="chat_template_kwargs")

        try:
            turns, chosen, described = await self._known_turns(messages), variables, ""
            if tools or variables or effort is not None or options.adds_variables:
                known = self._tokenizer.chat_template.variables(tools)
                chosen = _with_effort(_renamed_switch(variables, known), effort, known, self._model)
                chosen = chosen | _option_variables(options, known, self._model)
                if tools and self._format is not None and "tools" not in known:
                    described = self._format.describe(tools).strip()
                    turns = _with_tools(turns, described)
            chosen = chosen | {
                "tools": tools,
                "add_generation_prompt": options.add_generation_prompt,
                "continue_final_message": options.continue_final_message,
            }
            text = await self._renderer.render(turns, chosen)
        except TokenizerError as e:
            # The cause alone, because the sentence names a file of the server.
            message = f"The chat template refused the messages: {e.__cause__}"
            if e.__cause__ is None:
                message = f"{self._model} has no usable chat template; a plain prompt needs none."
            raise ApiError(400, message, param="messages") from e
        if described not in text:
            message = f"tools: the chat template of {self._model} prints neither tools nor a system prompt"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        return text

    async def _known_turns(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the messages in roles that the template has, with tool calls as text for one that has none."""
        template = self._tokenizer.chat_template
        if any(message["role"] == "developer" for message in messages) and "developer" not in template.source:
            messages = [_in_role(message, "system" if message["role"] == "developer" else None) for message in messages]
        has_calls = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        if not has_calls or self._format is None:
            return messages
        if await self._renderer.takes_calls():
            return self._format.with_ids(messages)
        return [_without_calls(message, self._format) for message in messages]


def _in_role(message: dict[str, Any], role: str | None) -> dict[str, Any]:
    return message if role is None else {**message, "role": role}


def _without_calls(message: dict[str, Any], format: ToolFormat) -> dict[str, Any]:
    """Return a message whose tool calls are text in the format of the model's calls, and whose role is not tool."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    text = format.write([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    return {**plain, "content": "\n".join(filter(None, [message["content"], text]))}


def _option_variables(options: TemplateOptions, known: frozenset[str], model: str) -> dict[str, Any]:
    """Return the variables of the template that stand for fields of the request. Raises ApiError if it has none."""
    found: dict[str, Any] = {}
    for field, variable in (("documents", "documents"), ("thinking_token_budget", "thinking_budget")):
        value = getattr(options, field)
        if value is not None and variable not in known:
            message = f"{field}: the chat template of {model} has no variable {variable}"
            raise ApiError(400, message, param=field, code="unsupported_parameter")
        if value is not None:
            found[variable] = value
    return found


def _with_tools(messages: Sequence[dict[str, Any]], tools: str) -> Sequence[dict[str, Any]]:
    """Return the messages with a description of the tools at the end of the system prompt."""
    first, rest = messages[0], messages[1:]
    if first["role"] != "system":
        first, rest = {"role": "system", "content": ""}, messages
    content = first["content"]
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": f"\n\n{tools}"}]
    else:
        content = f"{content}\n\n{tools}"
    return [{**first, "content": content}, *rest]


def _renamed_switch(variables: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return the variables with the switch of reasoning under the name that the template reads."""
    for name, other in (_SWITCHES, _SWITCHES[::-1]):
        if name in variables and name not in known and other in known and other not in variables:
            return {other if key == name else key: value for key, value in variables.items()}
    return variables


def _with_effort(
    variables: dict[str, Any], effort: ReasoningEffort | None, known: frozenset[str], model: str
) -> dict[str, Any]:
    """Return the variables with that of `reasoning_effort`. "none" turns reasoning off where there is a switch."""
    if effort is None:
        return variables
    switch = next((name for name in _SWITCHES if name in known), None)
    chosen: dict[str, Any]
    if effort == "none" and switch is not None:
        chosen = {switch: False}
    elif _EFFORT in known:
        chosen = {_EFFORT: effort}
    else:
        allowed = f"; it can only turn it off: expected 'none', found '{effort}'" if switch is not None else ""
        raise ApiError(
            400,
            f"{_EFFORT}: the chat template of {model} takes no effort of reasoning{allowed}",
            param=_EFFORT,
            code="unsupported_parameter",
        )
    for name, value in chosen.items():
        if variables.get(name, value) != value:
            raise ApiError(
                400,
                f"{_EFFORT}: '{effort}' contradicts {name} {variables[name]!r} of chat_template_kwargs",
                param=_EFFORT,
            )
    return variables | chosen


def _with_digests(processor: Processor, text: str, frames: list[DecodedMedium]) -> Prompt:
    """Return the prompt, and compute the digests of its media here, for they take long."""
    prompt = processor.prompt(text, frames)
    assert len(prompt.digests) >= len(frames)  # a video with its sound is two media
    return prompt


def _refuse_media(messages: Sequence[Message], model: str) -> None:
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if not isinstance(part, TextPart):
                raise ApiError(
                    400,
                    f"messages.{i}.content.{j}: {model} reads text only; expected a part of type 'text', "
                    f"found {part.type!r}",
                    param="messages",
                )
