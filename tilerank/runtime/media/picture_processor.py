"""The base of the processors of Gemma 3 and 4, Mistral Small and mllama, which take pictures alone."""

from collections.abc import Sequence

from tilerank.loader.fields import Fields
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.errors import MediaError
from ..protocol.prompt import Prompt
from .decoder import DecodedMedium
from .processor import Processor

_MAX_ID = 1 << 24


class PictureProcessor(Processor):
    """Reads the token that stands for pictures. Raises ConfigError.

    mark: what the chat template writes for a picture, by default this token.
    """

    kinds = ("image",)

    def __init__(self, tokenizer: Tokenizer, config: Fields, key: str, token: str, mark: str = "") -> None:
        """config, key: the fields of config.json, and the one with the id of the token."""
        super().__init__(tokenizer)
        self._token, self._mark = token, mark or token
        self.placeholders = tuple(dict.fromkeys((self._mark, token)))
        self._id = config.integer(key, 0, _MAX_ID)
        if (found := tokenizer.token_id(token)) != self._id:
            raise config.fail(key, f"{found}, as the tokenizer has {token}")

    def text_prompt(self, token_ids: list[int]) -> Prompt:
        if self._id in token_ids:
            raise MediaError(f"the prompt contains {self._token}, but has no picture; send media as chat parts")
        return Prompt(token_ids)

    def _check_marks(self, found: int, media: Sequence[DecodedMedium]) -> None:
        """Raise MediaError unless a text has a mark for each picture."""
        if found != len(media):
            raise MediaError(
                f"expected one {self._mark} in the prompt for each picture, found {found} for {len(media)}; the text "
                f"of a message may not contain {self._mark}"
            )

    def _check_tokens(self, token_ids: list[int], pictures: int) -> None:
        """Raise MediaError unless a prompt has a token for each picture."""
        if (found := token_ids.count(self._id)) != pictures:
            raise MediaError(f"expected {pictures} placeholders of pictures in the prompt, found {found}")
