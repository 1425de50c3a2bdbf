"""Damaged variants of a JSON text, for fuzzing the code that reads it."""

import json
from typing import Any

from hypothesis import strategies as st

_hostile = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(
        [0, -1, 2**63, 10**30, 10**400, float("nan"), float("inf"), 1e308, -0.0, "", "\0", "\ud800", "../x", [], {}]
    ),
    st.floats(),
    st.text(max_size=8),
    st.recursive(
        st.integers(),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all members of objects and arrays, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in [(*path, key), *_paths(item, (*path, key))]]


@st.composite
def json_mutations(draw: st.DrawFn, text: str) -> bytes:
    """Draw `text` with one or two values replaced, removed or added, or with its bytes cut, flipped or nested
    deeply."""
    if draw(st.integers(0, 3)) == 0:
        raw = bytearray(text.encode())
        at = draw(st.integers(0, len(raw) - 1))
        kind = draw(st.sampled_from(["cut", "flip", "insert", "nest"]))
        if kind == "cut":
            return bytes(raw[:at])
        if kind == "flip":
            raw[at] ^= draw(st.integers(1, 255))
        elif kind == "insert":
            raw[at:at] = draw(st.binary(min_size=1, max_size=4))
        else:
            raw[at:at] = b"[" * 50_000
        return bytes(raw)
    value = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        places = _paths(value)
        if not places:
            break
        *route, last = draw(st.sampled_from(places))
        holder = value
        for key in route:
            holder = holder[key]
        action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if action == "remove":
            del holder[last]
        elif action == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=8))] = draw(_hostile)
        else:
            holder[last] = draw(_hostile)
    return json.dumps(value).encode()
