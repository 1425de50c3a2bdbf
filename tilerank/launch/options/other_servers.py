"""Options of other servers that change nothing here: they are taken, and a note says what happens in their place."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class _Option(NamedTuple):
    """note: what happens, after the name of the option. settings: of argparse."""

    note: str
    settings: dict[str, Any]


_FLAG = {"action": "store_true"}
_OPTIONS = {
    "--trust-remote-code": _Option("no code of a model directory is ever run, and none is needed", _FLAG),
    "--device": _Option("tilerank runs on CPUs alone", {"choices": ("cpu", "auto")}),
    "--enable-auto-tool-choice": _Option("models whose format of tool calls is known always choose", _FLAG),
    "--tool-call-parser": _Option(
        "the format of tool calls follows from the chat template and the family of the model", {"metavar": "NAME"}
    ),
    "--reasoning-parser": _Option("reasoning is found by the marks of the model's vocabulary", {"metavar": "NAME"}),
}
MODEL = ("--trust-remote-code", "--device")
ANSWERS = ("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser")


def add_arguments(parser: argparse.ArgumentParser, options: Sequence[str]) -> None:
    group = parser.add_argument_group("options of other servers, which change nothing")
    for name in options:
        group.add_argument(name, help=_OPTIONS[name].note, **_OPTIONS[name].settings)


def notes(args: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each of the options that is given."""
    for name, option in _OPTIONS.items():
        if getattr(args, name.strip("-").replace("-", "_"), None):
            yield f"tilerank: {name}: {option.note}"
