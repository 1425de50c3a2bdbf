"""Grammars for constrained decoding, compiled by llguidance from its format: Lark with %json and %regex.

Imports no torch, because the process that tests grammars before the engine sees them uses this module as well. It
imports llguidance on first use, because most starts never need it.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tilerank.loader.card import read_card
from tilerank.loader.tokenizer import Tokenizer

from .errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


NOTHING_FOLLOWS = "NoExtensionBias"
"""The error of llguidance where the grammar allows no further token, and no end either."""
_OF_SCHEMA = "failed to compile JSON schema: "
_EXPLANATIONS = (
    (r"Failed to generate regex for \w+ range", "minimum, maximum: this range is too far from zero"),
    (r"oneOf constraints", "oneOf: its alternatives must differ in type or in a required constant"),
    (r"required property '(.*)' is unsatisfiable", r"required: no value is allowed for the property \1"),
    (r"required item is unsatisfiable", "minItems: it asks for more items than the schema allows"),
    (r"Regex is empty", "pattern, format, enum, minLength, maxLength: no string follows all of them"),
    (r"incompatible types", "type, enum, const, allOf: no type follows all of them"),
    (r"Unsatisfiable schema: (.*)", r"no value follows it: \1"),
)
"""Messages of llguidance, and what they mean for a client."""


class Vocabulary:
    """The vocabulary of a model, which compiles grammars to matchers over its tokens.

    tokenizer_dir: where its tokenizer is; None for the directory of the model.
    """

    def __init__(self, model_dir: Path, tokenizer_dir: Path | None = None) -> None:
        self._model_dir = model_dir
        self._tokenizer_dir = tokenizer_dir or model_dir

    @cached_property
    def tokens(self) -> LLTokenizer:
        """llguidance's view of the tokenizer, loaded on first use, because few servers get requests with grammars.

        Raises RequestError if llguidance does not support the tokenizer.
        """
        from llguidance import LLTokenizer

        card = read_card(self._model_dir)
        tokenizer = Tokenizer(self._tokenizer_dir)
        others = (id for id in tokenizer.end_token_ids() if id < card.vocab_size)
        ends = list(dict.fromkeys((*card.eos_token_ids, *others)))
        try:
            return LLTokenizer(tokenizer.to_json(), n_vocab=card.vocab_size, eos_token=ends or None)
        except ValueError as e:
            raise RequestError(f"this model's tokenizer does not support grammars: {e}") from e

    def matcher(self, grammar: str) -> LLMatcher:
        """Compile `grammar` and return a matcher at the beginning of a text. Raises RequestError if that fails."""
        from llguidance import LLMatcher, LLParserLimits

        # Far above what ordinary grammars need. Fuel limits the work on the automata of regular expressions; each of
        # their states takes 1 to 2 kB. precompute_large_lexemes keeps its default (on): without it, some work does not
        # count.
        limits = LLParserLimits(
            initial_lexer_fuel=200_000,
            step_lexer_fuel=50_000,
            max_lexer_states=20_000,
            max_grammar_size=100_000,
            verbose_errors=False,
        )
        matcher = LLMatcher(self.tokens, grammar, log_level=0, limits=limits)
        allowed_tokens(matcher)  # LLMatcher does not raise for an invalid grammar; this does
        return matcher


def allowed_tokens(matcher: LLMatcher) -> bytes:
    """Return the mask of allowed next tokens, one bit for each token, lowest bit first.

    Raises RequestError if the grammar is invalid or exceeds the limits.
    """
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        # Positions and excerpts refer to the generated grammar, which the client has not seen.
        message = re.sub(r"^at \d+\(\d+\): |\n *\d+ \| .*|<[\w-]+/>", "", matcher.get_error(), flags=re.DOTALL)
        raise RequestError(f"the grammar: {_explained(' '.join(message.split()))}")
    return bits


def _explained(message: str) -> str:
    """Return a message of llguidance with the keywords of the schema that it is about."""
    if message == NOTHING_FOLLOWS:
        return "no token can follow: the rest of the schema or the grammar allows no text"
    if not message.startswith(_OF_SCHEMA):
        return message
    for expression, explanation in _EXPLANATIONS:
        if (match := re.search(expression, message)) is not None:
            return _OF_SCHEMA + match.expand(explanation)
    return re.sub(r"(?<=: )(?=regex parse error|lookarounds)", "pattern: ", message, count=1)
