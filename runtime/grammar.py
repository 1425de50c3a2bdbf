"""Grammars that texts must follow, by llguidance (its format: Lark with %json and %regex). No torch: the process that
tries grammars out, before the engine sees them, has these as well."""

import re
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tilerank.loader.config import load_config

from .errors import RequestError

# The library counts its work and gives up beyond these; an honest grammar stays far below. Of the automata that regular
# expressions become: `fuel` is work, `states` are 1 to 2 kB each. Lexemes are walked ahead for all tokens
# (precompute_large_lexemes, its default): without, some work is not counted.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class Vocabulary:
    """The tokens of a model directory, as grammars see them."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir

    @cached_property
    def tokens(self) -> LLTokenizer:
        """Read when first needed: few servers are asked for grammars. RequestError if it has not what that takes."""
        config = load_config(self._model_dir)
        text = (self._model_dir / "tokenizer.json").read_text()
        try:
            return LLTokenizer(text, n_vocab=config.vocab_size, eos_token=list(config.eos_token_ids) or None)
        except ValueError as e:
            raise RequestError(f"the tokens of this model cannot be matched with grammars: {e}") from e

    def matcher(self, grammar: str) -> LLMatcher:
        """At the beginning of a text of `grammar`, and its mask for the first token. RequestError if it is refused."""
        matcher = LLMatcher(self.tokens, grammar, log_level=0, limits=LIMITS)
        allowed(matcher)
        return matcher


def allowed(matcher: LLMatcher) -> bytes:
    """One bit a token, lowest bit first: may it come next? RequestError if there is no telling."""
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        # Without where it is in what we made of the request, and the lines that show it.
        said = re.sub(r"^at \d+\(\d+\): |\n *\d+ \| .*|<[\w-]+/>", "", matcher.get_error(), flags=re.DOTALL)
        raise RequestError(f"the grammar: {' '.join(said.split())}")
    return bits
