"""Typed access to the fields of a JSON object in a model directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError, show


class Fields:
    """Typed access to one JSON object; every refusal names the file, the key, what was expected and what was found."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """Return the same fields, and defaults of those that have no value."""
        return Fields(self.path, {**defaults, **{k: v for k, v in self.values.items() if v is not None}}, self.prefix)

    def fail(self, key: str, expected: str) -> ConfigError:
        found = show(self.values[key]) if key in self.values else "no such key"
        return ConfigError(f"{self.path}: {self.prefix}{key}: expected {expected}, found {found}")

    def has(self, key: str) -> bool:
        """Return whether the key has a value. JSON null counts as absent, as in transformers."""
        return self.values.get(key) is not None

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.values.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, *, above: bool = True) -> float:
        """Return a number above `low` (above=False: or equal to it) and at most `high`."""
        value: Any = self.values.get(key)
        # Integers of any length are JSON; comparing before converting keeps float() from overflowing.
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not low <= value <= high or (above and value == low):
            raise self.fail(key, f"a number {'above' if above else 'from'} {low:g}, at most {high:g}")
        return float(value)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if type(value) is not str or not value:
            raise self.fail(key, "a string")
        return value

    def flag(self, key: str) -> bool:
        """Return a flag; False when absent, which is the class default of every flag read here."""
        if not self.has(key):
            return False
        value = self.values[key]
        if type(value) is not bool:
            raise self.fail(key, "true or false")
        return value

    def object(self, key: str) -> "Fields":
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return Fields(self.path, value, f"{self.prefix}{key}.")

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return one or several token ids, without duplicates."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise self.fail(key, f"token ids from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))
