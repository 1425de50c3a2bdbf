"""Special and added tokens that a model directory names outside its vocabulary file, read as transformers 5 reads them.

tokenizer_config.json names the special tokens (bos_token, eos_token, ...) and describes added tokens in
added_tokens_decoder. Only where that entry is missing, special_tokens_map.json and added_tokens.json are read as well;
the standard names in special_tokens_map.json replace those in tokenizer_config.json.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from .errors import TokenizerError, show
from .files import is_listed, read_json_object

STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SURROGATES = re.compile("[\ud800-\udfff]")  # JSON can escape one alone, which is not Unicode text
_FLAGS = {"single_word", "lstrip", "rstrip", "normalized", "special"}


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a model directory.

    names: name ("bos_token", "image_token") -> content. added: the tokens to add to those of the vocabulary file, in
    this order. Adding a token that is in the vocabulary changes its flags and keeps its id.
    """

    names: dict[str, str]
    added: list[AddedToken]


@dataclass
class _Named:
    """Special tokens by standard name, by a name of the model's own (`image_token`), and without a name.

    extra, additional: extra_special_tokens and its older name; the latter counts only where the former is missing.
    """

    standard: dict[str, AddedToken] = field(default_factory=dict)
    own: dict[str, AddedToken] = field(default_factory=dict)
    extra: list[AddedToken] | None = None
    additional: list[AddedToken] | None = None

    def by_name(self) -> dict[str, AddedToken]:
        return {name: self.standard[name] for name in STANDARD_NAMES if name in self.standard} | self.own

    def unnamed(self) -> list[AddedToken]:
        return (self.additional if self.extra is None else self.extra) or []


def read_special_tokens(model_dir: Path, added: dict[int, AddedToken]) -> SpecialTokens:
    """Read the special tokens of a directory. Raises TokenizerError for malformed files.

    added: the added tokens of the vocabulary file by id.
    """
    named, described, complete = _read_files(model_dir)
    described = described if complete else described | added
    by_name = named.by_name()
    tokens = [described[id] for id in sorted(described)]
    present = {token.content for token in (*added.values(), *tokens)}
    for token in (*by_name.values(), *named.unnamed()):
        if token.content not in present and token not in tokens:
            tokens.append(token)
    special = {token.content for token in by_name.values()}
    for token in tokens:
        token.special = token.special or token.content in special
    return SpecialTokens({name: token.content for name, token in by_name.items()}, tokens)


def read_described_tokens(model_dir: Path) -> dict[int, AddedToken]:
    """Return by id the tokens that other files than the vocabulary file describe. Raises TokenizerError."""
    return _read_files(model_dir)[1]


def read_tokenizer_config(model_dir: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; empty if there is none. Raises TokenizerError."""
    return _read(model_dir / "tokenizer_config.json")


def _read_files(model_dir: Path) -> tuple[_Named, dict[int, AddedToken], bool]:
    """Return the named tokens, the described ones by id, and whether these are all that the model has."""
    where = model_dir / "tokenizer_config.json"
    config = _read(where)
    named = _from_config(where, config)
    if "added_tokens_decoder" in config:
        return named, _added_tokens_decoder(where, config["added_tokens_decoder"]), True
    _update_from_map(model_dir / "special_tokens_map.json", named)
    return named, _added_tokens(model_dir / "added_tokens.json", named), False


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file."""
    return read_json_object(path.parent, path.name, TokenizerError) if is_listed(path.parent, path.name) else {}


def _from_config(where: Path, config: dict[str, Any]) -> _Named:
    named = _Named()
    for name, value in config.items():
        if name in STANDARD_NAMES:
            if value is not None:
                named.standard[name] = _token(where, name, value)
        elif name.endswith("_token") and isinstance(value, str | dict):
            named.own[name] = _token(where, name, value)
    key = "extra_special_tokens"
    if not config.get(key) and "additional_special_tokens" in config:
        key = "additional_special_tokens"
    extra = config.get(key)
    if isinstance(extra, dict):
        named.own |= {name: _token(where, f"{key}.{name}", token) for name, token in extra.items()}
    elif key in config:
        named.extra = [] if extra is None else _tokens(where, key, extra)
    return named


def _update_from_map(where: Path, named: _Named) -> None:
    """Read special_tokens_map.json. Its standard names win over those in `named`, its other names do not."""
    own: dict[str, AddedToken] = {}
    for name, value in _read(where).items():
        if name in STANDARD_NAMES and value is None:
            named.standard.pop(name, None)
        elif name in STANDARD_NAMES:
            named.standard[name] = _token(where, name, value, special=True)
        elif name.endswith("_token") and isinstance(value, str | dict):
            own[name] = _token(where, name, value, special=True)
        elif name == "extra_special_tokens" and value is not None:
            named.extra = [*(named.extra or []), *_tokens(where, name, value)]
        elif name == "additional_special_tokens" and value is not None:
            named.additional = _tokens(where, name, value)
    named.own = own | named.own


def _added_tokens_decoder(where: Path, value: Any) -> dict[int, AddedToken]:
    if not isinstance(value, dict):
        raise TokenizerError(f"{where}: added_tokens_decoder: expected an object of tokens by id, found {show(value)}")
    found: dict[int, AddedToken] = {}
    for id, token in value.items():
        if not (id.isascii() and id.isdigit() and len(id) <= 10):
            raise TokenizerError(f"{where}: added_tokens_decoder: expected token ids as keys, found {show(id)}")
        found[int(id)] = _token(where, f"added_tokens_decoder.{id}", token)
    return found


def _added_tokens(where: Path, named: _Named) -> dict[int, AddedToken]:
    """Read added_tokens.json: content -> id. Tokens with a standard name and extra_special_tokens are special."""
    special = {token.content for token in (*named.standard.values(), *(named.extra or []))}
    found: dict[int, AddedToken] = {}
    for content, id in _read(where).items():
        if type(id) is not int or id < 0:
            raise TokenizerError(f"{where}: {show(content)}: expected a token id, found {show(id)}")
        found[id] = _token(where, show(content), {"content": content, "special": content in special})
    return found


def _tokens(where: Path, key: str, value: Any) -> list[AddedToken]:
    if not isinstance(value, list):
        raise TokenizerError(f"{where}: {key}: expected a list of tokens, found {show(value)}")
    return [_token(where, key, token) for token in value]


def _token(where: Path, key: str, value: Any, **override: bool) -> AddedToken:
    """Return the token that `value` describes: its content, or an object with its content and flags."""
    fields = {"content": value, "special": True} if isinstance(value, str) else value
    if isinstance(fields, dict) and isinstance(fields.get("content"), str):
        flags = {name: flag for name, flag in fields.items() if name not in ("content", "__type")}
        if (
            not _SURROGATES.search(fields["content"])
            and flags.keys() <= _FLAGS
            and all(isinstance(flag, bool) for flag in flags.values())
        ):
            return AddedToken(fields["content"], **flags | override)
    raise TokenizerError(f"{where}: {key}: expected a token, found {show(value)}")
