"""Builds the prompts of requests: text and messages in, token ids and media out."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

from tilerank.loader.chat.jinja import MAX_TEXT
from tilerank.loader.chat.template import ChatTemplate, ReasoningStart
from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

from ...media.decoder import DecodedMedium
from ...media.messages import MediaSource, split_media
from ...media.processor import Processor
from ...protocol.errors import MediaError
from ...protocol.prompt import Prompt
from ..http.errors import ApiError
from .messages import Message, TextPart
from .request import ReasoningEffort, TemplateOptions, TemplateRequest
from .text_encoder import MAX_TOKENS, Conversation, TextEncoder, TextError
from .tools.format import ToolFormat

_RESERVED = {"self", "messages", "tools", "add_generation_prompt"}
_SWITCHES = ("enable_thinking", "thinking")
"""The variable that turns reasoning on and off has one of these names: Qwen's or DeepSeek's."""
_OTHER_TOOLS = "xml_tools"
"""The variable of tools in SmolLM3's template."""
_EFFORT = "reasoning_effort"
_ROLES = ("system", "developer", "user", "assistant", "tool")
ReadMedia = Callable[[Sequence[MediaSource]], Awaitable[list[DecodedMedium]]]
"""Returns the media of a conversation, decoded. Raises MediaError, or an error of its own."""


class ChatPrompt(NamedTuple):
    """The prompt of a conversation. thinking: how the answer to it begins."""

    prompt: Prompt
    thinking: ReasoningStart


class PromptBuilder:
    """Builds prompts for one model: those of the HTTP server and of `tilerank generate`. Its methods raise ApiError,
    and UnavailableError.

    model: its name in messages. format: of the model's tool calls. processor: of pictures, videos and sound; None for a
    model that reads text only. encoder: renders and tokenises. context_length: returns the most tokens of a prompt;
    None if they are not known yet. defaults: variables of the chat template that requests leave out. strict: refuse an
    effort of reasoning that the template does not take, which is else a hint.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        format: ToolFormat | None,
        processor: Processor | None,
        encoder: TextEncoder,
        context_length: Callable[[], int | None],
        defaults: Mapping[str, Any],
        *,
        strict: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._format = format
        self._processor = processor
        self._encoder = encoder
        self._context_length = context_length
        self._defaults = dict(defaults)
        self._strict = strict

    async def from_texts(
        self, prompt: str | list[str] | list[int] | list[list[int]], add_special_tokens: bool = True
    ) -> list[Prompt]:
        """Return the prompts of /v1/completions."""
        given: Sequence[str | int | list[int]] = [prompt] if isinstance(prompt, str) else prompt
        prompts: list[list[int]]
        if isinstance(given[0], int):
            prompts = [[token for token in given if isinstance(token, int)]]
        else:
            texts = [one for one in given if isinstance(one, str)]
            encoded = iter(await self.encode(texts, add_special_tokens, "prompt"))
            prompts = [one if isinstance(one, list) else next(encoded) for one in given if not isinstance(one, int)]
        if not all(prompts):
            raise ApiError(400, "The prompt is empty; expected at least one token.", param="prompt")
        if self._processor is None:
            return [Prompt(ids) for ids in prompts]
        try:
            return [self._processor.text_prompt(ids) for ids in prompts]
        except MediaError as e:
            raise ApiError(400, f"prompt: {e}", param="prompt") from e

    async def from_messages(self, messages: list[Message], request: TemplateRequest, read: ReadMedia) -> ChatPrompt:
        """Return the prompt of a conversation. Empties `messages`, which take much memory.

        Raises MediaError as well, for media that cannot be used.
        """
        processor = self._processor
        if processor is None:
            _refuse_media(messages, self._model)
            with self._text_errors("messages"):
                keeps_arguments = self._template().keeps_arguments
                plain = [message.for_template(False, keeps_arguments) for message in messages]
                messages.clear()
                ids, thinking = await self._encoder.encode_chat(await self._conversation(plain, request))
            return ChatPrompt(Prompt(ids), thinking)
        if request.options.add_special_tokens:
            message = "add_special_tokens: chats of a model that takes pictures have those of the template alone"
            raise ApiError(400, message, param="add_special_tokens")
        plain, sources = split_media(
            [message.for_template(parts=True, keeps_arguments=False) for message in messages],
            processor.placeholders,
            request.options.hears_videos,
        )
        messages.clear()
        with self._text_errors("messages"):
            rendered = await self._encoder.render(await self._conversation(plain, request))
            media = await read(sources)
            # Without the special tokens of the tokenizer: templates print them where the model needs them.
            [ids] = await self._encoder.encode([processor.write(rendered.text, media)], add_special_tokens=False)
        return ChatPrompt(await asyncio.to_thread(_with_digests, processor, ids, media), rendered.thinking)

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool, param: str, *, marks: bool = True
    ) -> list[list[int]]:
        """Return the token ids of texts. param: the field of the request that they come from. marks: special tokens in
        a text become their ids."""
        if (together := sum(map(len, texts))) > MAX_TEXT:
            message = f"{param}: expected at most {MAX_TEXT} characters together, found {together}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if (length := max(map(len, texts), default=0)) > self._longest_text():
            raise self._too_long(length, param)
        if not texts:
            return []
        with self._text_errors(param):
            return await self._encoder.encode(texts, add_special_tokens, marks)

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, at the beginning of a text and after a space."""
        forms = [form for word in words for form in (word, f" {word.lstrip()}")]
        tokens = map(tuple, await self.encode(forms, False, "bad_words"))
        return tuple(dict.fromkeys(word for word in tokens if word))

    def _longest_text(self) -> int:
        """Return the most characters of a text that may fit into the context, so that others are refused unread."""
        tokens = self._context_length()
        return MAX_TEXT if tokens is None else min(tokens * self._tokenizer.longest_token, MAX_TEXT)

    def _too_long(self, length: int, param: str) -> ApiError:
        tokens, most = self._context_length(), self._longest_text()
        why = f", as many as the {tokens} tokens of the context have at most" if most < MAX_TEXT else ""
        message = f"{param}: expected at most {most} characters{why}, found {length}"
        return ApiError(400, message, param=param, code="context_length_exceeded")

    @contextmanager
    def _text_errors(self, param: str) -> Iterator[None]:
        """Turn the errors of the encoder into those of the API."""
        try:
            yield
        except TextError as e:
            raise self._api_error(e, param) from e

    def _api_error(self, error: TextError, param: str) -> ApiError:
        model, code = self._model, None
        match error.cause:
            case "characters":
                return self._too_long(int(str(error)), param)
            case "tokens":
                message = f"{param}: expected at most {MAX_TOKENS} tokens, found {error}"
                code = "context_length_exceeded"
            case "tools":
                message = f"tools: the chat template of {model} prints neither tools nor a system prompt"
                param, code = "tools", "unsupported_parameter"
            case "no template":
                message = f"{model} has no usable chat template; a plain prompt needs none."
            case "template":
                message = f"The chat template refused the messages: {error}"
            case "tokenizer":
                message = f"{param}: {error}"
            case "limits":
                what = "rendering and tokenising them" if param == "messages" else "tokenising it"
                message = f"{param}: {what} takes more than {error}"
        return ApiError(400, message, param=param, code=code)

    async def _conversation(self, messages: Sequence[dict[str, Any]], request: TemplateRequest) -> Conversation:
        """Return the messages and variables as the chat template takes them. Raises TextError as well."""
        variables, effort, tools, options = request
        reserved = _RESERVED & variables.keys()
        if reserved:
            raise ApiError(400, f"chat_template_kwargs: {min(reserved)} cannot be set", param="chat_template_kwargs")
        turns, chosen, described = await self._known_turns(messages), variables, ""
        if tools or variables or self._defaults or effort is not None or options.adds_variables:
            facts = await self._encoder.facts()
            known = facts.variables if tools is None else facts.tool_variables
            chosen = _renamed_switch(variables, known)
            if effort is not None:
                chosen |= self._effort(effort, chosen, known, facts.efforts)
            chosen = _renamed_switch(self._defaults, known) | chosen | _option_variables(options, known, self._model)
            if tools and "tools" not in known and _OTHER_TOOLS in known:
                chosen = {_OTHER_TOOLS: tools} | chosen
            elif tools and self._format is not None and "tools" not in known:
                described = self._format.describe(tools).strip()
                turns = _with_tools(turns, described)
        chosen = chosen | {
            "tools": tools,
            "add_generation_prompt": options.add_generation_prompt,
            "continue_final_message": options.continue_final_message,
        }
        return Conversation(turns, chosen, described, options.add_special_tokens, self._longest_text())

    def _effort(
        self, effort: ReasoningEffort, variables: Mapping[str, Any], known: frozenset[str], efforts: Sequence[str]
    ) -> dict[str, Any]:
        """Return the variables that stand for an effort of reasoning. "none" turns reasoning off where there is a
        switch.

        efforts: those that the template takes, of which the nearest is used; none for any. Raises ApiError if
        `variables` say something else.
        """
        switch = next((name for name in _SWITCHES if name in known), None)
        chosen: dict[str, Any] = {}
        if effort == "none" and switch is not None:
            chosen = {switch: False}
        elif self._strict and (_EFFORT not in known or (efforts and effort not in efforts)):
            raise self._no_effort(effort, efforts, switch is not None)
        elif _EFFORT in known:
            chosen = {_EFFORT: _nearest_effort(effort, efforts)}
        for name, value in chosen.items():
            if variables.get(name, value) != value:
                raise ApiError(
                    400,
                    f"{_EFFORT}: '{effort}' contradicts {name} {variables[name]!r} of chat_template_kwargs",
                    param=_EFFORT,
                )
        return chosen

    def _no_effort(self, effort: ReasoningEffort, efforts: Sequence[str], has_switch: bool) -> ApiError:
        taken = f"takes {', '.join(efforts)}, found '{effort}'" if efforts else "takes no effort of reasoning"
        allowed = f"; it can only turn it off: expected 'none', found '{effort}'" if has_switch else ""
        message = f"{_EFFORT}: the chat template of {self._model} {taken}{allowed}"
        return ApiError(400, message, param=_EFFORT, code="unsupported_parameter")

    async def _known_turns(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the messages in roles that the template has, with tool calls as text for one that has none. Raises
        ApiError for a role that it does not have."""
        for i, role in enumerate(message["role"] for message in messages):
            if role not in _ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", self._template().source):
                expected = f"{', '.join(_ROLES)}, or another one of the chat template of {self._model}"
                raise ApiError(
                    400, f"messages.{i}.role: expected {expected}, found {role!r}", param=f"messages.{i}.role"
                )
        if any(message["role"] == "developer" for message in messages) and "developer" not in self._template().source:
            messages = [_in_role(message, "system" if message["role"] == "developer" else None) for message in messages]
        has_calls = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        if not has_calls or self._format is None:
            return messages
        if (await self._encoder.facts()).takes_calls:
            return self._format.with_ids(messages)
        return [_without_calls(message, self._format) for message in messages]

    def _template(self) -> ChatTemplate:
        try:
            return self._tokenizer.chat_template
        except TokenizerError as e:
            raise TextError("no template") from e


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


def _nearest_effort(effort: ReasoningEffort, efforts: Sequence[str]) -> str:
    """Return the effort that a template takes and that is nearest to a wanted one; the wanted one if it takes any."""
    order = get_args(ReasoningEffort)
    return min(efforts, key=lambda one: abs(order.index(one) - order.index(effort)), default=effort)


def _with_digests(processor: Processor, ids: list[int], frames: list[DecodedMedium]) -> Prompt:
    """Return the prompt, and compute the digests of its media here, for they take long."""
    prompt = processor.expand(ids, frames)
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
