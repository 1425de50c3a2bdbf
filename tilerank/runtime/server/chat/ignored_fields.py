"""The fields of a request that the server does not know: it ignores them and says so, or refuses them.

Coding agents send new fields from one week to the next, most of them without effect on an answer. A server that refuses
them fails at the first request.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationInfo

log = logging.getLogger(__name__)

MAX_NAMES = 32
"""Names that are listed for one request."""
MAX_LOGGED = 256
"""Names that a server logs, each once: a client may send any number of them."""
_LONGEST = 64
_UNUSUAL = re.compile(r"[^A-Za-z0-9_.$-]")
"""What a header must not hold, or a line of the log."""


class IgnoredFields:
    """The names of what is ignored in one request. strict: nothing is, and the first unknown field is refused."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._names: dict[str, None] = {}

    def add(self, names: Iterable[str]) -> None:
        """Note names, as far as there is room for more."""
        for name in names:
            if len(self._names) >= MAX_NAMES:
                return
            self._names[_UNUSUAL.sub("?", name[:_LONGEST])] = None

    @property
    def names(self) -> list[str]:
        """The names, in the order in which they were found."""
        return list(self._names)


class IgnoredNames:
    """What a server has logged as ignored."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, names: Iterable[str], path: str) -> None:
        """Log each name once. path: of the request that had it."""
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                log.warning("%s: '%s' is ignored; --strict-fields refuses what this server does not know", path, name)


def ignored_by(info: ValidationInfo) -> IgnoredFields:
    """Return where a validator notes what it ignores: the context of the validation. Strict without one."""
    return IgnoredFields(strict=True) if info.context is None else info.context


def known_only(given: dict[str, Any], known: frozenset[str], info: ValidationInfo) -> dict[str, Any]:
    """Return the known fields of a part of a request. Raises ValueError if the others are refused."""
    if given.keys() <= known:
        return given
    unknown, ignored = [name for name in given if name not in known], ignored_by(info)
    if ignored.strict:
        raise ValueError(f"this server has no field '{unknown[0]}' here")
    ignored.add(unknown)
    return {name: value for name, value in given.items() if name in known}


def without_tools(tools: Any, kinds: re.Pattern[str], info: ValidationInfo) -> Any:
    """Return the tools of a request without those of some types, which are noted as ignored. Raises
    ValueError if they are refused."""
    if not isinstance(tools, list):
        return tools
    kept, ignored = [], ignored_by(info)
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kinds.fullmatch(kind):
            if ignored.strict:
                raise ValueError(f"this server runs no tool of type {kind!r}")
            ignored.add([f"tools.{kind}"])
        else:
            kept.append(tool)
    return kept
