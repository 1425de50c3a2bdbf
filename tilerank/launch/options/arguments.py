"""The parser of the command line: errors in one sentence, the nearest name for an unknown one, --config files, and the
types of values."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import LaunchError

OTHER_NAMES = {
    "--ctx-size": "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-tokens": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
    "--threads": "--cores",
}
"""Options of other programs, and the name of the same thing here."""
OTHER_COMMANDS = {
    "list": "`hf cache ls` lists the models that were downloaded",
    "ls": "`hf cache ls` lists the models that were downloaded",
    "pull": "the first command that names a model downloads it, and `hf download` does it ahead",
    "run": "`tilerank chat MODEL` talks with a model",
}
"""Commands of other programs, and how the same is done here."""


class ModelAfterNames(argparse._ExtendAction):
    """Takes values up to the next option, and those of each time that it is given. If no model is given, the last value
    of an option with several is the model (see `parse`)."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        super().__call__(parser, namespace, values, option)
        if len(values) > 1:
            namespace.names_before_model = self.dest


class UsageError(LaunchError):
    """A command line that cannot be parsed."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError with one sentence. The usage of a command with many options would hide it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Name the nearest subcommand for one that does not exist."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            other = OTHER_COMMANDS.get(str(value)) if action.dest == "command" else None
            hint = _nearest(str(value), action.choices) if other is None else f"; {other}"
            self.error(f"there is no {action.dest} {value!r}{hint}")
        super()._check_value(action, value)

    def check_option(self, where: str, key: str, arguments: Sequence[str]) -> None:
        """Raise UsageError unless the option of a file has the values that its `arguments` give it.

        where, key: of the option in the file, for the error.
        """
        action = self._option_string_actions.get(option := _option(key))
        if action is None:
            raise UsageError(f"{where}: there is no option {key}{_nearest(option, self._option_string_actions)}")
        alone = Parser(prog=self.prog, add_help=False, exit_on_error=False)
        alone._add_action(action)
        try:
            alone.parse_args(arguments)
        except argparse.ArgumentError as e:
            raise UsageError(f"{where}: {key}: {e.message}") from e


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`. Raises UsageError, which names the subcommand and the nearest option."""
    args, unknown = parser.parse_known_args(argv)
    if not unknown:
        if (names := getattr(args, "names_before_model", None)) and args.model is None and args.model_path is None:
            args.model = Path(getattr(args, names).pop())
        return args
    command = _subparser(parser, argv)
    name = unknown[0].split("=", 1)[0]
    if name.startswith("-"):
        command.error(f"there is no option {name}{_nearest(name, command._option_string_actions)}")
    return command.error(f"unexpected argument {name!r}")


def _nearest(name: str, choices: Iterable[str]) -> str:
    other = OTHER_NAMES.get(name)
    found = [other] if other in (known := list(choices)) else difflib.get_close_matches(name, known, 1, 0.7)
    return f"; did you mean {found[0]}?" if found else ""


def _subparser(parser: Parser, argv: Sequence[str]) -> Parser:
    """Return the parser of the subcommand that `argv` names, however deep."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for i, argument in enumerate(argv):
                if argument in action.choices:
                    return _subparser(action.choices[argument], argv[i + 1 :])
    return parser


def with_config(argv: Sequence[str], parser: Parser | None = None) -> list[str]:
    """Return `argv` with the options that each `--config FILE` names before those of the command line, which win.

    The file is YAML. Its keys are options without their dashes, `model` the model; true stands for an option without a
    value, a list for an option that is given several times. LaunchError names the file and what is wrong with it.
    parser: of the command line, with which its options are checked.
    """
    rest, options, positional = list(argv), [], []
    command = None if parser is None else _subparser(parser, argv[:1])
    while (place := next((i for i, a in enumerate(rest) if a.split("=", 1)[0] == "--config"), None)) is not None:
        text = rest.pop(place)
        if "=" in text:
            path = text.split("=", 1)[1]
        elif place < len(rest):
            path = rest.pop(place)
        else:
            raise LaunchError("--config: expected a file")
        where, found = f"--config: {path}", _read_config(Path(path))
        model = found.pop("model", None)
        if not isinstance(model, str | None):
            raise LaunchError(f"{where}: model: expected text, found {model!r}")
        positional += [] if model is None else [model]
        if "config" in found:
            raise LaunchError(f"{where}: config: expected no further file, found {found['config']!r}")
        for key, value in found.items():
            arguments = as_arguments(where, key, value)
            if command is not None and command is not parser:
                command.check_option(where, key, arguments)
            options += arguments
    return [*rest[:1], *positional, *options, *rest[1:]]


def _read_config(path: Path) -> dict[str, object]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as e:
        raise LaunchError(f"--config: {path} cannot be read: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise LaunchError(f"--config: {path} is not YAML: {' '.join(str(e).split())}") from e
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise LaunchError(f"--config: {path}: expected a mapping of options, found {type(content).__name__}")
    return content


def as_arguments(where: str, key: str, value: object) -> list[str]:
    """Return the arguments of an option. where: the place of the value, for the LaunchError about a wrong one."""
    option = _option(key)
    if value is True:
        return [option]
    if value is False or value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, str | int | float) for v in values):
        raise LaunchError(f"{where}: {key}: expected text, a number, true, false or a list of these")
    return [f"{option}={v}" for v in values]


def _option(key: str) -> str:
    """Return the option of a key of a file."""
    return f"--{key.replace('_', '-')}"


def whole_number(low: int, high: float = float("inf")) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    bounds = f"from {low}{f' to {high}' * (high < float('inf'))}"

    def parse(text: str) -> int:
        if re.fullmatch(r"-?[0-9]{19,}", text) and high == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is too large; expected at most 18 digits")
        if not re.fullmatch(r"-?[0-9]{1,4000}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return int(text)

    return parse


def template_variables(text: str) -> dict[str, Any]:
    """An argparse type: variables of the chat template, a JSON object of texts, numbers, booleans and null."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or any(isinstance(value, dict | list) for value in found.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object of texts, numbers, booleans and null")
    return found


def json_numbers(text: str) -> dict[str, float]:
    """An argparse type: a JSON object of numbers."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or any(type(value) not in (int, float) for value in found.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object of numbers")
    return found


def path_prefix(text: str) -> str:
    """An argparse type: the beginning of the path of a URL, such as /llm; "/" is none."""
    prefix = text.rstrip("/")
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", prefix):
        raise argparse.ArgumentTypeError(f"{text!r} is not the beginning of a path, such as /llm")
    return prefix


def whole_numbers(low: int) -> Callable[[str], list[int]]:
    """Return an argparse type for distinct whole numbers >= `low`, separated by commas."""
    parse = whole_number(low)
    return lambda text: list(dict.fromkeys(parse(part) for part in text.split(",")))


def real_number(accepts: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """An argparse type: a number for which `accepts` is true. what: such a number, for the error."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number from `low` to `high`."""
    return real_number(lambda value: low <= value <= high, f"a number from {low:g} to {high:g}")


seconds = real_number(lambda value: 0 < value < float("inf"), "a number of seconds")
"""An argparse type: a finite number of seconds above 0."""
