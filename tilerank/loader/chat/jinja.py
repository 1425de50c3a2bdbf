"""The chat templates of a model directory: Jinja programs that turn messages into the text format of the model.

The programs are untrusted: they run in Jinja's immutable sandbox, get plain JSON values only and read no files. They
may take any time and memory, also while they are compiled. The environment is that of transformers
(utils/chat_template_utils.py), because published templates use its helpers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import TokenizerError, show
from ..files import is_listed, read_json_object, read_text
from ..vocabularies.table import usual_chat_template
from .template import MISTRAL_THINK, ChatTemplate, ReasoningMarks, Rendered, Segment, thinking_after, thinking_inside

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"  # a file NAME.jinja for each further template
MAX_TEXT = 8 << 20
"""Characters of the text of a conversation."""
_CALL = {"needle": "x"}
_RESULT = "the result"
# Some templates accept only ids of nine characters.
_TRIAL_CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": _CALL}}
_TRIAL = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [_TRIAL_CALL]},
    {"role": "tool", "content": _RESULT, "name": "f", "tool_call_id": "123456789"},
)
"""A conversation with a tool call, which shows in which form a template takes the arguments."""
_ANSWER = "the answer"
_ANSWERED = ({"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER})
_REASON = "the reason"
_REASONED = (_ANSWERED[0], {**_ANSWERED[1], "reasoning_content": _REASON})


@dataclass(frozen=True)
class _Template:
    """A template of a model directory, which is compiled on first use."""

    name: str
    where: Path
    source: str

    @cached_property
    def program(self) -> jinja2.Template:
        with self._compiling():
            return _environment().from_string(self.source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that it reads and does not set on every path."""
        with self._compiling():
            return frozenset(find_undeclared_variables(_environment().parse(self.source)))

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        try:
            yield
        except Exception as failure:
            # Other errors than Jinja's occur: `break` outside a loop becomes Python that does not compile.
            raise TokenizerError(f"{self.where}: chat template {self.name} does not compile: {failure}") from failure


class JinjaTemplate(ChatTemplate):
    """The chat templates of a model directory, from files of their own, chat_template.json or tokenizer_config.json.

    special_tokens: bos_token, eos_token, ...; variables of the templates. marks: those of reasoning that the vocabulary
    has. file: one template in place of all of them. Methods raise TokenizerError for a template that does not compile.
    """

    def __init__(
        self,
        model_dir: Path,
        special_tokens: Mapping[str, str],
        marks: ReasoningMarks | None,
        file: Path | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._marks = marks
        self._special_tokens = dict(special_tokens)
        if file is None:
            found = _find(model_dir)
        else:
            found = {"default": (file, read_text(file.parent, file.name, TokenizerError))}
        self._templates = {name: _Template(name, where, source) for name, (where, source) in found.items()}

    @cached_property
    def _reasons_in_parts(self) -> bool:
        """Whether the template takes the reasoning of an earlier answer as a part of its content, as Mistral's do."""
        template = self._templates.get("default")
        if self._marks is not MISTRAL_THINK or template is None:
            return False
        turns = [_with_reasoning_part(message) for message in _REASONED]
        try:
            text = self._rendered(template, turns, {"tools": None, "add_generation_prompt": False})
        except _TemplateFailure:
            return False
        return _REASON in text and _ANSWER in text

    @property
    def source(self) -> str:
        """The text of all templates, which are not compiled for it."""
        return "\n".join(template.source for template in self._templates.values())

    def variables(self, tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
        """Return the names of the variables that the template for these tools reads.

        Raises TokenizerError if there is no such template.
        """
        return self._template(self._name(tools)).variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> Rendered:
        """Return the text of a conversation (see ChatTemplate).

        messages: a template that prints the arguments of earlier tool calls as text gets their JSON. tools: if given,
        the template named tool_use is used where there is one, as in transformers.
        """
        template = self._template(self._name(tools))
        calls = any(message.get("tool_calls") for message in messages)
        if calls and self._prints_arguments:
            messages = [_with_json_arguments(message) for message in messages]
        if self._reasons_in_parts:
            messages = [_with_reasoning_part(message) for message in messages]
        values = {**variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._rendered(template, messages, values)
        except _TemplateFailure as failure:
            # The template may raise any exception; no code of this project runs inside it.
            cause = failure.__cause__
            message = f"{template.where}: chat template {template.name} refused the messages: {cause}"
            raise TokenizerError(message) from cause
        if continue_final_message:
            text = _cut(text, messages[-1]["content"])
            return Rendered([Segment(text, True)], thinking_inside(text, self._marks))
        return Rendered([Segment(text, True)], thinking_after(text, self._marks))

    @cached_property
    def takes_calls(self) -> bool:
        """Whether the templates print the tool calls of earlier turns and their results."""
        template = self._template("tool_use" if "tool_use" in self._templates else "default")
        calls = [_with_json_arguments(one) for one in _TRIAL] if self._prints_arguments else _TRIAL
        try:
            text = self._rendered(template, calls, {"tools": None, "add_generation_prompt": True})
        except _TemplateFailure:
            return False
        return "needle" in text and _RESULT in text

    @cached_property
    def after_answer(self) -> str:
        """The text that the template prints after an answer that is the last message: the end of the turn, if it has
        one. Empty if there is no template, or one that refuses or changes the answer."""
        template = self._templates.get("default")
        if template is None:
            return ""
        try:
            text = self._rendered(template, _ANSWERED, {"tools": None, "add_generation_prompt": False})
        except _TemplateFailure:
            return ""
        _, _, after = text.rpartition(_ANSWER)
        return after if _ANSWER in text else ""

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"

    def _template(self, name: str) -> _Template:
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise TokenizerError(f"{self._model_dir}: expected a chat template named default, found {names or 'none'}")
        return self._templates[name]

    def _rendered(
        self, template: _Template, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        values = {
            **self._special_tokens,
            "documents": None,
            **variables,
            "messages": [_message(message) for message in messages],
        }
        plain, program = _plain(values), template.program
        pieces, length = list[str](), 0
        try:
            for piece in program.generate(plain):
                length += len(piece)
                if length > MAX_TEXT:
                    raise ValueError(f"the text has more than {MAX_TEXT} characters")
                pieces.append(piece)
        except Exception as failure:
            raise _TemplateFailure from failure
        return "".join(pieces)

    @cached_property
    def _prints_arguments(self) -> bool:
        """Whether the templates print the arguments of tool calls as text (DeepSeek), so that these must be JSON."""
        template = self._template("tool_use" if "tool_use" in self._templates else "default")
        values = {"tools": None, "add_generation_prompt": True}
        try:
            return repr(_CALL) in self._rendered(template, _TRIAL, values)
        except _TemplateFailure:
            pass
        try:
            return json.dumps(_CALL) in self._rendered(template, [_with_json_arguments(one) for one in _TRIAL], values)
        except _TemplateFailure:
            return False


def _cut(text: str, content: Any) -> str:
    """Return a rendered conversation up to the end of its last message, whose content is a text or has text parts."""
    if isinstance(content, list):
        content = next((part["text"] for part in reversed(content) if part.get("type") == "text"), "")
    found = text.rfind(content.strip())
    if not content.strip() or found < 0:
        why = ValueError("continue_final_message: it does not print the text of the last message")
        raise TokenizerError(f"the chat template: {why}") from why
    for ending in (content.lstrip(), content.strip()):  # templates may strip the text
        if text.startswith(ending, found):
            return text[: found + len(ending)]
    raise AssertionError("one of both was found")


class _TemplateFailure(Exception):
    """A template raised the exception that is the cause of this one."""


def _find(model_dir: Path) -> dict[str, tuple[Path, str]]:
    """Return name -> (file, source) of all templates. The newest of the storage formats wins."""
    found: dict[str, tuple[Path, str]] = {}
    if is_listed(model_dir, FILE):
        found["default"] = model_dir / FILE, read_text(model_dir, FILE, TokenizerError)
    for path in sorted((model_dir / FOLDER).glob("*.jinja")):
        found[path.stem] = path, read_text(model_dir, path.name, TokenizerError, FOLDER)
    if found:
        return found
    for name in ("chat_template.json", "tokenizer_config.json"):
        if is_listed(model_dir, name):
            entry = read_json_object(model_dir, name, TokenizerError).get("chat_template")
            if entry is not None:
                where = model_dir / name
                return {name: (where, source) for name, source in _named(where, entry).items()}
    usual = usual_chat_template(model_dir)
    return {} if usual is None else {"default": (model_dir, usual)}


def _named(where: Path, found: Any) -> dict[str, str]:
    """Return the templates of a `chat_template` entry: one source, or a list of {name, template}."""
    entries = found if isinstance(found, list) else [{"name": "default", "template": found}]
    templates: dict[str, str] = {}
    for entry in entries:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise TokenizerError(f"{where}: chat_template: expected a string or named templates, found {show(found)}")
        templates[name] = source
    return templates


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under every name that published templates read."""
    reasoning = _reasoning(message)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _reasoning(message: Mapping[str, Any]) -> Any:
    fields = ("reasoning_content", "thinking", "reasoning")
    return next((message[key] for key in fields if message.get(key) is not None), None)


def _with_reasoning_part(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an answer with its reasoning as the first part of its content."""
    reasoning, content = _reasoning(message), message.get("content")
    if not reasoning or message["role"] != "assistant":
        return message
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *parts]}


def _with_json_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as JSON text."""
    changed = dict(message)
    if message.get("tool_calls"):
        changed["tool_calls"] = [_with_json(call) for call in message["tool_calls"]]
    return changed


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else _tojson(arguments)
    return {**call, "function": {**function, "arguments": text}}


def _plain(value: Any) -> Any:
    """Return a copy that consists of JSON types only. Methods of other objects could leave the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TokenizerError(f"chat messages: expected JSON values, found {type(value).__name__}")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's text for training. Here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without underscore attributes, which could leave the sandbox."""

    # No named parameters, because `namespace(self=1)` is a valid call.
    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute may not begin with an underscore: {show(name)}")


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of templates. It has no loader, so that they cannot include or import files."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace, dict=_Dict()
    )
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON. Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """The function `dict` of templates. The type itself would expose its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)
