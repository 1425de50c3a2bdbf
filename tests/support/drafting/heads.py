"""The draft head of a model against that of tools/reference_mtp.py."""

from collections import abc
from typing import Any
from unittest import mock

import torch
from batching import answers, forget
from torch import Tensor

from drafting import AllDrafts, Depths, KnownTexts, mixed
from tilerank.runtime.lead.drafting.draft_counts import Proposal
from tilerank.runtime.lead.drafting.drafts import Drafting
from tilerank.runtime.lead.drafting.head_drafts import MAX_HEAD_DRAFTS, HeadDrafts
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sequence import Sequence
from tilerank.runtime.protocol.rank_messages import Chunk, Draft, Step
from tilerank.runtime.step.cache import num_pages


def compare_heads(
    engine: Engine, wanted: dict[str, Tensor], some: list[Request], rows: int, *, decode: bool
) -> dict[str, Any]:
    """Return the largest error of a logit of the head, relative to its row's largest, the prompts after which it drafts
    other tokens, and, if `decode`, what it drafts otherwise while texts are decoded, and the texts that are others.

    some: requests for the greedy tokens of the prompts. rows: of a chunk.
    """
    errors, differ, wrong = list[float](), list[int](), list[tuple[int, int]]()
    for p in range(len(some)):
        ids, right, after = (wanted[f"{p}.{name}"] for name in ("token_ids", "draft", "drafts"))
        logits, drafts = drafted(engine, ids.tolist(), rows, len(after))
        errors.append(float(((logits - right).abs().amax(-1) / right.abs().amax(-1)).max()))
        differ += [] if drafts == after.tolist() else [p]
    if decode:
        source = WatchedHead(engine, wanted, some)
        forget(engine, chunk_rows=rows)
        engine.drafting = Drafting(source, engine.scheduler, AllDrafts())
        texts = [[token for token, *_ in answer] for answer in answers(engine, some)]
        wrong = source.wrong + [(p, 0) for p, text in enumerate(texts) if text != source.texts[p]]
        assert source.right
    return {"draft_error": max(errors), "wrong_drafts": differ, "wrong_while_decoding": wrong}


def drafted(engine: Engine, ids: list[int], rows: int, count: int) -> tuple[Tensor, list[int]]:
    """Return the logits of the head after each token but the first, and `count` tokens that it drafts after the last,
    for a text in chunks of `rows`. No request may run."""
    worker, number, end = engine.worker, 1 << 40, len(ids) - 1
    head, found, drafts = worker.drafts, list[Tensor](), list[list[int]]()
    assert head is not None
    choose, pages = head._argmax, list(range(num_pages(end + count)))

    def watched(logits: Tensor) -> list[int]:
        found.append(logits.clone())
        return choose(logits)

    starts = range(0, end, rows)
    with mock.patch.object(head, "_argmax", watched):
        for start in starts:
            stop = min(start + rows, end)
            new_pages, before = (pages, [number]) if start == 0 else ([], [])
            step = Step([Chunk(number, start, ids[start:stop], new_pages, 1)], before, state_slots=[0])
            after = Chunk(number, start, ids[start + 1 : stop + 1], [], stop - start)
            message = Draft([after], [count if stop == end else 1])
            worker.announce(step)
            worker.run(step)
            worker.announce(message)
            drafts = worker.draft(message)
    engine.scheduler.finished.append(number)
    return torch.cat(found[: len(starts)]), drafts[0]


class WatchedHead(HeadDrafts):
    """Compares what the head drafts with the reference. Proposes it, or the tokens that are known to come."""

    def __init__(self, engine: Engine, wanted: dict[str, Tensor], some: list[Request]) -> None:
        super().__init__(engine.worker)
        self._depth = Depths(MAX_HEAD_DRAFTS)
        ids = [wanted[f"{p}.token_ids"].tolist() for p in range(len(some))]
        self.texts = [text[-request.params.max_new_tokens :] for text, request in zip(ids, some, strict=True)]
        self.right, self.wrong = 0, list[tuple[int, int]]()
        self._numbers = {tuple(request.prompt.token_ids): p for p, request in enumerate(some)}
        known = dict(zip(self._numbers, self.texts, strict=True))
        self._known = KnownTexts(known, engine.card.vocab_size, mixed)
        self._likeliest = [wanted[f"{p}.likeliest"].tolist() for p in range(len(some))]

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[Proposal]:
        own = super().propose(sequences, most)
        for sequence, proposal in zip(sequences, own, strict=True):
            p = self._numbers[tuple(sequence.prompt.token_ids)]
            if proposal.tokens[:1] == [self._likeliest[p][sequence.length - 2]]:
                self.right += 1
            else:
                self.wrong.append((p, sequence.length))
        return own if sequences[0].length % 7 == 0 else self._known.propose(sequences, most)
