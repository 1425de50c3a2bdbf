"""The chat template of harmony: a conversation becomes messages, whose contents never become special tokens.

It takes the place of the template that the released directories have: that one quotes arguments and results a second
time, leaves out all calls of a message but the first, and its text is tokenised as a whole, so that a user could write
the marks of a message. The text is that of openai-harmony 0.0.8, except that it leaves out the reasoning of finished
turns, and no other reasoning.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from ..chat.template import ChatTemplate, ReasoningStart, Rendered, Segment
from ..errors import TokenizerError
from .functions import tools_section
from .marks import ANALYSIS, CALL, CHANNEL, COMMENTARY, CONSTRAIN, END, FINAL, FUNCTIONS, MESSAGE, RETURN, START

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_KNOWLEDGE = "Knowledge cutoff: 2024-06"
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_CALLS = "Calls to these tools must go to the commentary channel: 'functions'."
_VARIABLES = frozenset(("tools", "reasoning_effort", "current_date", "model_identity"))


class HarmonyTemplate(ChatTemplate):
    """The chat template of models with the vocabulary of gpt-oss.

    Its variables beside the tools: reasoning_effort, by default medium; current_date as YYYY-MM-DD, by default today;
    model_identity, the first sentence of the system message.
    """

    has_channels = True
    keeps_arguments = True
    efforts = ("low", "medium", "high")
    source = ""
    takes_calls = True
    after_answer = RETURN

    def variables(self, tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
        return _VARIABLES

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> Rendered:
        """Return the messages of a conversation (see ChatTemplate).

        The messages of the system and of developers at the beginning are one developer message, which has the tools as
        well. Reasoning is kept from the last message of the user on.
        """
        writer = _Writer()
        try:
            writer.message("system", _system_text(variables, bool(tools)))
            writer.conversation(messages, tools or (), continue_final_message)
        except (ValueError, RecursionError, MemoryError) as e:
            raise TokenizerError(f"harmony: {e}") from e
        if add_generation_prompt:
            writer.begin("assistant")
            return Rendered(writer.segments, ReasoningStart.OPTIONAL)
        return Rendered(writer.segments, writer.inside if continue_final_message else ReasoningStart.OPTIONAL)


class _Writer:
    """Collects the segments of a conversation. inside: in what the last message ends that is continued."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.inside = ReasoningStart.NEVER
        self._names: dict[str, str] = {}  # of called tools, by the id of the call
        self._unanswered: list[str] = []  # ids of calls without a result

    def begin(self, role: str) -> None:
        self._mark(START)
        self._text(role)

    def message(self, role: str, content: str, *, to: str = "", channel: str = "", json: bool = False) -> None:
        """Write a message and its end. to: its recipient. json: the type of its content is written."""
        self.open(role, content, to=to, channel=channel, json=json)
        self._mark(CALL if role == "assistant" and to else END)

    def open(self, role: str, content: str, *, to: str = "", channel: str = "", json: bool = False) -> None:
        """Write a message without its end."""
        self.begin(role)
        if to:
            self._text(f" to={to}")
        if channel:
            self._mark(CHANNEL)
            self._text(channel)
        if json:
            self._text(" ")
            self._mark(CONSTRAIN)
            self._text("json")
        self._mark(MESSAGE)
        self._text(content)

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], continues: bool
    ) -> None:
        """Write the messages after that of the system. continues: the last one has no end. Raises ValueError."""
        roles = [message["role"] for message in messages]
        first = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
        instructions = "\n\n".join(message["content"] for message in messages[:first] if message["content"])
        if instructions or tools:
            self.message("developer", _developer_text(instructions, tools))
        last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        for i in range(first, len(messages)):
            self._turn(i, messages[i], keeps_reasoning=i > last_user, is_open=continues and i == len(messages) - 1)

    def _turn(self, number: int, message: Mapping[str, Any], keeps_reasoning: bool, is_open: bool) -> None:
        """Write a message of a conversation. number: its number there."""
        match message["role"]:
            case "user":
                self.message("user", message["content"])
            case "system" | "developer":
                self.message("developer", _developer_text(message["content"], ()))
            case "tool":
                self.message(self._tool_of(number, message), message["content"], to="assistant", channel=COMMENTARY)
            case "assistant":
                self._assistant(message, _reasoning_of(message) if keeps_reasoning else "", is_open)
            case role:
                expected = "system, developer, user, assistant or tool"
                raise ValueError(f"messages.{number}.role: expected {expected}, found {role!r}")

    def _assistant(self, message: Mapping[str, Any], reasoning: str, is_open: bool) -> None:
        """Write the messages of a turn of the assistant: reasoning, text, and calls or the answer."""
        content, calls = message["content"], message.get("tool_calls") or ()
        if is_open and calls:
            raise ValueError("continue_final_message: expected a last message without calls")
        if is_open and reasoning and not content:
            self.open("assistant", reasoning, channel=ANALYSIS)
            self.inside = ReasoningStart.OPENED
            return
        if reasoning:
            self.message("assistant", reasoning, channel=ANALYSIS)
        if is_open:
            self.open("assistant", content, channel=FINAL)
        elif content:
            self.message("assistant", content, channel=COMMENTARY if calls else FINAL)
        for call in calls:
            name = call["function"]["name"]
            self._names[call["id"]] = name
            self._unanswered.append(call["id"])
            arguments = _arguments_text(call["function"]["arguments"])
            self.message("assistant", arguments, to=FUNCTIONS + name, channel=COMMENTARY, json=True)

    def _tool_of(self, number: int, message: Mapping[str, Any]) -> str:
        """Return the author of the result of a call. Without an id it is that of the first call without a result."""
        id = message.get("tool_call_id") or next(iter(self._unanswered), None)
        if id in self._unanswered:
            self._unanswered.remove(id)
        name = self._names.get(id or "") or message.get("name")
        if not name:
            raise ValueError(f"messages.{number}.tool_call_id: expected the id of an earlier call, found {id!r}")
        return FUNCTIONS + str(name).removeprefix(FUNCTIONS)

    def _mark(self, mark: str) -> None:
        self.segments.append(Segment(mark, True))

    def _text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, False))


def _system_text(variables: Mapping[str, Any], has_tools: bool) -> str:
    effort = variables.get("reasoning_effort", "medium")
    if effort not in HarmonyTemplate.efforts:
        raise ValueError(f"reasoning_effort: expected {', '.join(HarmonyTemplate.efforts)}, found {effort!r}")
    given = variables.get("current_date")
    try:
        today = date.today() if given is None else date.fromisoformat(str(given))
    except ValueError:
        raise ValueError(f"current_date: expected a date as YYYY-MM-DD, found {given!r}") from None
    identity = variables.get("model_identity") or IDENTITY
    channels = f"{_CHANNELS}\n{_CALLS}" if has_tools else _CHANNELS
    return f"{identity}\n{_KNOWLEDGE}\nCurrent date: {today}\n\nReasoning: {effort}\n\n{channels}"


def _developer_text(instructions: str, tools: Sequence[Mapping[str, Any]]) -> str:
    sections = [f"# Instructions\n\n{instructions}"] if instructions or not tools else []
    return "\n\n".join([*sections, tools_section(tools)] if tools else sections)


def _reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a turn, which clients send back under several names."""
    found = (message.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
    return next((one for one in found if isinstance(one, str)), "")


def _arguments_text(arguments: Any) -> str:
    """Return the arguments of an earlier call: as the client wrote them, or the JSON of its object."""
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False) if not isinstance(arguments, str) else "{}"
