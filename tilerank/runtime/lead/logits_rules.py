"""How a request changes logits before sampling: filters, bias and penalties. No step reads a whole list of a client.

What depends on the request alone is prepared once, and all of its choices share it. What depends on the text of a
choice is updated with each token.
"""

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ..protocol.params import SamplingParams

_MORE = 64
"""Tokens for which a list of ids gets room at least."""


class LogitsRules:
    """The rules of a request. The seed and the length limits of its parameters do not matter here.

    ends: the tokens that end its texts. vocab: columns of the logits.
    """

    def __init__(self, params: SamplingParams, ends: frozenset[int], vocab: int) -> None:
        self.params = params
        self.ends = ends
        self.vocab = vocab
        self.blocked: Tensor | None = None
        """bool [vocab]: True for tokens beside params.allowed_token_ids. None if all are allowed."""
        if params.allowed_token_ids:
            self.blocked = torch.ones(vocab, dtype=torch.bool)
            self.blocked[torch.tensor(params.allowed_token_ids)] = False
        self.biased = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self.bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        words = [word for word in params.bad_words if len(word) == 1]
        self.never = sorted({id for (id,) in words})
        """The bad words that are one token."""
        # A tokenizer may have more tokens than the model has logits.
        self.never_early = sorted({*self.never, *(id for id in ends if id < vocab)})
        """The tokens of `never` and the ends: all are left out before params.min_new_tokens."""
        self.bad_words: dict[int, list[tuple[bytes, int]]] = {}
        """The longer ones, by their last token but one: the tokens before the last one as bytes, and the last one."""
        for *begin, last in params.bad_words:
            if begin:
                self.bad_words.setdefault(begin[-1], []).append((_as_bytes(begin), last))
        self._in_prompt: tuple[Tensor, Tensor] | None = None

    def in_prompt(self, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the tokens of the request's prompt that have logits, ascending, and bool [vocab], True for these.

        Others are placeholders of pictures, which are never generated.
        """
        if self._in_prompt is None:
            ids = torch.tensor(prompt, dtype=torch.int64)
            seen = torch.zeros(self.vocab, dtype=torch.bool)
            seen[ids[(ids >= 0) & (ids < self.vocab)]] = True
            self._in_prompt = seen.nonzero()[:, 0], seen
        return self._in_prompt


class TextRules:
    """The rules of a request for one of its texts, whose first tokens are `prompt`."""

    def __init__(self, rules: LogitsRules, prompt: Sequence[int]) -> None:
        self.of_request = rules
        self._read = self._prompt_len = len(prompt)
        """Tokens that were taken into account so far."""
        self._bytes = bytearray()
        """The generated tokens, if there are bad words that are longer than one."""
        self._penalises = rules.params.presence_penalty != 0 or rules.params.frequency_penalty != 0
        self._generated = _Amounts()
        """The tokens of the text, each once, and the penalties for their presence and frequency."""
        self._counts: dict[int, int] = {}
        self._prompt_ids, self._in_prompt = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
        self._repeats = rules.params.repetition_penalty != 1
        self._new = _Amounts()
        """The tokens of the text that are not in the prompt, each once."""
        if self._repeats:
            self._prompt_ids, self._in_prompt = rules.in_prompt(prompt)

    def apply(self, values: Tensor, tokens: Sequence[int], forbidden: Tensor | None) -> None:
        """Apply grammar, filters, bias, penalties and min_p to the logits [vocab] that follow `tokens`, in place.

        forbidden: bool [vocab], True for tokens that the grammar of the text does not allow next. As in vLLM, min_p
        comes before top_k and top_p.
        """
        self._keep_up(tokens)
        rules, p = self.of_request, self.of_request.params
        for mask in (forbidden, rules.blocked):
            if mask is not None:
                values.masked_fill_(mask, -math.inf)
        if banned := self._banned(tokens):
            ids = torch.tensor(banned)
            kept = values[ids]
            values[ids] = -math.inf
            if values.max() == -math.inf:
                values[ids] = kept
        if len(rules.biased):
            values[rules.biased] += rules.bias
        if self._repeats:
            for seen in (self._prompt_ids, self._new.ids):
                old = values[seen]
                values[seen] = torch.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
        if self._penalises:
            values[self._generated.ids] -= self._generated.amounts
        if p.min_p > 0 and p.temperature > 0:
            values[values < values.max() + p.temperature * math.log(p.min_p)] = -math.inf

    def _keep_up(self, tokens: Sequence[int]) -> None:
        """Take the tokens into account that were generated since the last call."""
        p = self.of_request.params
        for token in tokens[self._read :]:
            if self.of_request.bad_words:
                self._bytes += _as_bytes([token])
            if not self._repeats and not self._penalises:
                continue
            count = self._counts[token] = self._counts.get(token, 0) + 1
            if self._penalises:
                self._generated.put(token, p.presence_penalty + p.frequency_penalty * count)
            if self._repeats and count == 1 and not self._in_prompt[token]:
                self._new.put(token, 0.0)
        self._read = len(tokens)

    def _banned(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a bad word, and those that would end the text too early."""
        rules, generated = self.of_request, len(tokens) - self._prompt_len
        banned = rules.never_early if generated < rules.params.min_new_tokens else rules.never
        if not generated or tokens[-1] not in rules.bad_words:
            return banned
        return banned + [last for begin, last in rules.bad_words[tokens[-1]] if self._bytes.endswith(begin)]


class _Amounts:
    """Different token ids [n] in order of arrival, and an amount of each, as tensors that grow."""

    def __init__(self) -> None:
        self._ids, self._amounts = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float32)
        self._places: dict[int, int] = {}

    @property
    def ids(self) -> Tensor:
        return self._ids[: len(self._places)]

    @property
    def amounts(self) -> Tensor:
        return self._amounts[: len(self._places)]

    def put(self, id: int, amount: float) -> None:
        """Set the amount of a token, and add it if it is new."""
        place = self._places.setdefault(id, len(self._places))
        if place == len(self._ids):
            more = max(_MORE, place)
            self._ids = torch.cat([self._ids, torch.empty(more, dtype=torch.int64)])
            self._amounts = torch.cat([self._amounts, torch.empty(more)])
        self._ids[place], self._amounts[place] = id, amount


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
