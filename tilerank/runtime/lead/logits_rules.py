"""How a request changes logits before sampling: filters, bias and penalties. No step reads a whole list of a client.

What depends on the request alone is prepared once, and all of its choices share it. What depends on the text of a
choice is updated with each token. `edit_logits` applies the rules of all rows of a step by one kernel.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilerank.kernels import ops

from ..protocol.params import SamplingParams

Ids = NDArray[np.int32]
Bits = NDArray[np.uint8]
"""A bit for each token of the vocabulary, the lowest first."""

_BIAS, _REPETITION, _PENALTY = range(3)
"""The numbers of a token: what is added to its logit, the repetition penalty, and what is subtracted at last."""
_NEUTRAL = (0.0, 1.0, 0.0)


def as_bits(allowed: NDArray[np.bool_]) -> Bits:
    """Return bool [vocab] as bits [ceil(vocab / 8)]."""
    return np.packbits(allowed, bitorder="little")


@dataclass(frozen=True)
class Edits:
    """What changes the logits of a row.

    ids: the tokens with `numbers`, each once. numbers: float32 [n, 3], see _BIAS. banned: tokens that are left out
    unless no other one remains. allowed: bits of the tokens that may come next; None if all may.
    """

    ids: Ids
    numbers: NDArray[np.float32]
    banned: Ids
    allowed: Bits | None


NO_EDITS = Edits(np.empty(0, np.int32), np.empty((0, 3), np.float32), np.empty(0, np.int32), None)


class LogitsRules:
    """The rules of a request. The seed and the length limits of its parameters do not matter here.

    ends: the tokens that end its texts. vocab: columns of the logits.
    """

    def __init__(self, params: SamplingParams, ends: frozenset[int], vocab: int) -> None:
        self.params = params
        self.ends = ends
        self.vocab = vocab
        self.allowed: Bits | None = None
        """Bits of params.allowed_token_ids. None if all are allowed."""
        if params.allowed_token_ids:
            allowed = np.zeros(vocab, np.bool_)
            allowed[np.array(params.allowed_token_ids)] = True
            self.allowed = as_bits(allowed)
        words = [word for word in params.bad_words if len(word) == 1]
        self.never = np.array(sorted({id for (id,) in words}), np.int32)
        """The bad words that are one token."""
        # A tokenizer may have more tokens than the model has logits.
        self.never_early = np.array(sorted({*self.never.tolist(), *(id for id in ends if id < vocab)}), np.int32)
        """The tokens of `never` and the ends: all are left out before params.min_new_tokens."""
        self.bad_words: dict[int, list[tuple[bytes, int]]] = {}
        """The longer ones, by their last token but one: the tokens before the last one as bytes, and the last one."""
        for *begin, last in params.bad_words:
            if begin:
                self.bad_words.setdefault(begin[-1], []).append((_as_bytes(begin), last))
        self._initial: tuple[Ids, NDArray[np.float32]] | None = None

    @cached_property
    def repeats(self) -> bool:
        return self.params.repetition_penalty != 1

    @cached_property
    def penalises(self) -> bool:
        return self.params.presence_penalty != 0 or self.params.frequency_penalty != 0

    def initial(self, prompt: Sequence[int]) -> tuple[Ids, NDArray[np.float32]]:
        """Return the tokens, ascending, whose logits change after the request's prompt, and their numbers (Edits).

        Tokens of the prompt without logits are placeholders of pictures, which are never generated.
        """
        if self._initial is None:
            biased = np.array(list(self.params.logit_bias), np.int64)
            in_prompt = np.unique(np.array(prompt if self.repeats else (), np.int64))
            in_prompt = in_prompt[(in_prompt >= 0) & (in_prompt < self.vocab)]
            ids = np.union1d(biased, in_prompt)
            numbers = np.full((len(ids), 3), _NEUTRAL, np.float32)
            numbers[np.searchsorted(ids, biased), _BIAS] = list(self.params.logit_bias.values())
            numbers[np.searchsorted(ids, in_prompt), _REPETITION] = self.params.repetition_penalty
            self._initial = ids.astype(np.int32), numbers
        return self._initial


class TextRules:
    """The rules of a request for one of its texts, whose first tokens are `prompt`.

    They take at most 16 bytes for each different token of the prompt (with a repetition penalty) and of the text, and
    begin when the text is first sampled.
    """

    def __init__(self, rules: LogitsRules, prompt: Sequence[int]) -> None:
        self.of_request = rules
        self._prompt = prompt
        self._read = len(prompt)
        """Tokens that were taken into account so far."""
        self._bytes = bytearray()
        """The generated tokens, if there are bad words that are longer than one."""
        self._ids, self._numbers = NO_EDITS.ids, NO_EDITS.numbers
        self._places: dict[int, int] = {}
        """Where the ids have the tokens of the text."""
        self._counts: dict[int, int] = {}
        self._used = -1
        """How many ids there are; the arrays have room for more. -1 before the text is first sampled."""

    def edits(self, tokens: Sequence[int], allowed: Bits | None) -> Edits:
        """Return what changes the logits that follow `tokens`, which begin as those of the last call.

        allowed: bits of the tokens that the grammar of the text allows next; None if it has none.
        """
        self._keep_up(tokens)
        ours = self.of_request.allowed
        if allowed is not None and ours is not None:
            allowed = allowed & ours
        used = self._used
        return Edits(self._ids[:used], self._numbers[:used], self._banned(tokens), ours if allowed is None else allowed)

    def _keep_up(self, tokens: Sequence[int]) -> None:
        """Take the tokens into account that were generated since the last call."""
        rules, p = self.of_request, self.of_request.params
        if self._used < 0:
            self._ids, self._numbers = rules.initial(self._prompt)
            self._used = len(self._ids)
        for token in tokens[self._read :]:
            if rules.bad_words:
                self._bytes += _as_bytes([token])
            if not rules.repeats and not rules.penalises:
                continue
            count = self._counts[token] = self._counts.get(token, 0) + 1
            if count == 1:
                self._add(token)
            if rules.penalises:
                penalty = p.presence_penalty + p.frequency_penalty * count
                self._numbers[self._places[token], _PENALTY] = penalty
        self._read = len(tokens)

    def _add(self, token: int) -> None:
        """Give a token of the text that is new a place among the ids."""
        initial, _ = self.of_request.initial(self._prompt)
        place = int(np.searchsorted(initial, token))
        if place == len(initial) or initial[place] != token:
            place = self._used
            self._used += 1
        if self._used > len(self._ids) or self._ids is initial:  # which other texts share
            more = max(self._used // 2, 64)
            self._ids = np.concatenate([self._ids, np.zeros(more, np.int32)])
            self._numbers = np.concatenate([self._numbers, np.full((more, 3), _NEUTRAL, np.float32)])
        self._places[token] = place
        self._ids[place] = token
        self._numbers[place, _REPETITION] = self.of_request.params.repetition_penalty

    def _banned(self, tokens: Sequence[int]) -> Ids:
        """Return the tokens that would complete a bad word, and those that would end the text too early."""
        rules, generated = self.of_request, len(tokens) - len(self._prompt)
        banned = rules.never_early if generated < rules.params.min_new_tokens else rules.never
        if not generated or tokens[-1] not in rules.bad_words:
            return banned
        complete = [last for begin, last in rules.bad_words[tokens[-1]] if self._bytes.endswith(begin)]
        return np.concatenate([banned, np.array(complete, np.int32)])


def edit_logits(logits: Tensor, edits: Sequence[Edits]) -> None:
    """Change the logits [m, vocab] in place, row by row as `edits` say."""
    masks = [each.allowed for each in edits if each.allowed is not None]
    numbers = iter(range(len(masks)))
    mask_of = [-1 if each.allowed is None else next(numbers) for each in edits]
    ops.edit_logits_(
        logits,
        _starts(each.ids for each in edits),
        torch.from_numpy(np.concatenate([each.ids for each in edits])),
        torch.from_numpy(np.concatenate([each.numbers for each in edits])),
        torch.tensor(mask_of, dtype=torch.int32),
        torch.from_numpy(np.stack(masks) if masks else np.empty((0, -(-logits.shape[1] // 8)), np.uint8)),
        _starts(each.banned for each in edits),
        torch.from_numpy(np.concatenate([each.banned for each in edits])),
    )


def _starts(parts: Iterable[Ids]) -> Tensor:
    return torch.tensor(list(accumulate(map(len, parts), initial=0)), dtype=torch.int32)


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
