"""Reads the JSON files of a model directory; whatever is in them, only the caller's own error comes out."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

# The largest such file in public use is a tokenizer.json of about 35 MB.
MAX_BYTES = 1 << 28


def show(value: object) -> str:
    """A value from a file as it appears in an error sentence: short, on one line, printable in any encoding."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is beyond the range of a double")
    return value


def read_json_object(path: Path, error: type[ValueError]) -> dict[str, Any]:
    """Returns the JSON object in `path`; raises `error` if it cannot be read, is no valid JSON or no object.

    NaN and infinities, which Python's parser lets through, are refused: no later comparison would catch a NaN.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise error(f"{path}: expected at most {MAX_BYTES} bytes of JSON, found {size}")
        value = json.loads(path.read_bytes(), parse_constant=_refuse_constant, parse_float=_finite)
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as failure:
        raise error(f"{path}: cannot be read: {failure.strerror}") from failure
    except RecursionError:
        raise error(f"{path}: not valid JSON: nested too deeply") from None
    except UnicodeDecodeError as failure:
        raise error(f"{path}: not valid JSON: not UTF-8 at byte {failure.start}") from None
    except error:
        raise
    except ValueError as failure:
        raise error(f"{path}: not valid JSON: {failure}") from None
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {show(value)}")
    return value
