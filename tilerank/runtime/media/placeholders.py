"""The base of the processors of Qwen and MOSS-VL: one token of the prompt for each medium."""

import re
from collections.abc import Sequence
from pathlib import Path

from tilerank.loader.card import read_config_fields
from tilerank.loader.errors import ConfigError
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.errors import MediaError
from ..protocol.prompt import Prompt
from .decoder import DecodedMedium
from .processor import Processor

_MAX_ID = 1 << 24


class PlaceholderProcessor(Processor):
    """Reads the placeholders "image_token" and those of other kinds of a model directory. Raises ConfigError."""

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        names = tokenizer.special_tokens
        self._start = names.get("vision_start_token", "<|vision_start|>")
        self._end = names.get("vision_end_token", "<|vision_end|>")
        self._tokens = {kind: names.get(f"{kind}_token", f"<|{kind}_pad|>") for kind in self.kinds}
        self.placeholders = tuple(self._tokens.values())
        config = read_config_fields(model_dir)
        config = config.object("thinker_config") if config.has("thinker_config") else config
        self._kinds: dict[int, str] = {}
        """The kind of medium of each placeholder's id."""
        for kind, token in self._tokens.items():
            id = config.integer(f"{kind}_token_id", 0, _MAX_ID)
            if (found := tokenizer.token_id(token)) != id:
                raise ConfigError(
                    f"{config.path}: {kind}_token_id: found {id}, but the tokenizer has {token} as {found}"
                )
            self._kinds[id] = kind

    def text_prompt(self, token_ids: list[int]) -> Prompt:
        for id in token_ids:
            if kind := self._kinds.get(id):
                raise MediaError(
                    f"the prompt contains {self._tokens[kind]}, but has no {kind}; send media as chat parts"
                )
        return Prompt(token_ids)

    def _split(self, text: str, media: Sequence[DecodedMedium]) -> list[str]:
        """Return the text in pieces, of which those with odd numbers are the placeholders of the media in order."""
        pieces = re.split("|".join(f"({re.escape(token)})" for token in self._tokens.values()), text)
        pieces = [piece for piece in pieces if piece is not None]
        kind_of = {token: kind for kind, token in self._tokens.items()}
        found, expected = [kind_of[piece] for piece in pieces[1::2]], [frames.kind for frames in media]
        for kind, token in self._tokens.items():
            if found.count(kind) != expected.count(kind):
                raise MediaError(
                    f"expected one {token} in the prompt for each {kind}, found {found.count(kind)} for "
                    f"{expected.count(kind)}; the text of a message may not contain {token}"
                )
        if found != expected:
            raise MediaError(f"expected placeholders for {', '.join(expected)} in this order, found {', '.join(found)}")
        return pieces

    def _check_places(self, token_ids: list[int], places: int) -> None:
        """Raise MediaError unless a prompt has so many placeholders."""
        if (found := sum(id in self._kinds for id in token_ids)) != places:
            raise MediaError(f"expected {places} placeholders of media in the tokens of the prompt, found {found}")


def name_medium(media: Sequence[DecodedMedium], index: int) -> str:
    """Return how errors name a medium: "image 2" is the second picture."""
    kind = media[index].kind
    return f"{kind} {sum(other.kind == kind for other in media[: index + 1])}"
