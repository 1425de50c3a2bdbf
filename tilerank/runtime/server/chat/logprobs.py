"""The bytes and the log-probabilities of the tokens of a choice, as APIs list them."""

import codecs
from collections.abc import Sequence
from typing import Any

from tilerank.loader.tokenizer import Tokenizer

from ...protocol.events import TokenEvent
from ...protocol.params import Logprobs


class TokenText:
    """The bytes of the tokens of one choice.

    offset: index of the next token's first character in the text. A token that continues a character has the index of
    that character. by_id: tokens are named by their ids, because the bytes of some are the same.
    """

    def __init__(self, tokenizer: Tokenizer, by_id: bool = False) -> None:
        self.offset = 0
        self._by_id = by_id
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True

    def bytes_of(self, id: int) -> bytes:
        """Return the bytes that a token would add if it came next."""
        return self._tokenizer.token_bytes(id, first=self._first)

    def name(self, id: int) -> str:
        """Return the name of a token in lists of log-probabilities."""
        return f"token_id:{id}" if self._by_id else self.bytes_of(id).decode(errors="replace")

    def advance(self, id: int) -> None:
        """Append a token."""
        data = self.bytes_of(id)
        self._first = self._first and not data
        self.offset += len(self._utf8.decode(data))


def token_entries(tokens: Sequence[TokenEvent], top: int, token_text: TokenText) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens, and of the `top` likeliest alternatives of each, as chats list them."""

    def entry(id: int, value: float) -> dict[str, Any]:
        return {"token": token_text.name(id), "logprob": value, "bytes": list(token_text.bytes_of(id))}

    entries = []
    for token in tokens:
        logprobs = _logprobs(token)
        alternatives = [entry(id, value) for id, value in logprobs.top[:top]]
        entries.append(entry(token.token_id, logprobs.chosen) | {"top_logprobs": alternatives})
        token_text.advance(token.token_id)
    return entries


def _logprobs(token: TokenEvent) -> Logprobs:
    assert token.logprobs is not None, "the request asked for log-probabilities"
    return token.logprobs
