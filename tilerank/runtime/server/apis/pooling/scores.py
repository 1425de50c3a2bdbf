"""The scores of pairs of texts, and documents in the order of their scores, in the form of vLLM and Jina.

A reranker reads both texts of a pair. With a model that embeds texts, the score is the cosine of their vectors.
"""

import math
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ...chat.fields import Form, ListOf, RequestBody
from ...chat.request import TruncatedTokens
from ...http.errors import ApiError
from ..service import Service
from .texts import MAX_TEXTS, Text, TextRequest, cosine

_ENTRY = 128
"""Bytes of a score as JSON."""


class _Scoring(RequestBody):
    """instruct: what makes a document relevant. truncate_prompt_tokens: documents are cut so that a prompt has at most
    so many tokens; by default, the longest that the model takes."""

    model: str | None = Field(None, max_length=1024)
    instruct: str | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    use_activation: bool = True


class Document(Form):
    """A document as an object."""

    text: Text


class RerankRequest(_Scoring):
    """POST /v1/rerank. top_n: how many documents are returned, 0 for all."""

    query: Text
    documents: Annotated[ListOf[Text | Document], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: int = Field(0, ge=0)
    return_documents: bool = True

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreRequest(_Scoring):
    """POST /v1/score: one text with each of several, or as many pairs as both lists are long."""

    text_1: Text | Annotated[ListOf[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    text_2: Text | Annotated[ListOf[Text], Field(min_length=1, max_length=MAX_TEXTS)]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            message = f"text_1: expected one text or {len(second)}, as many as text_2 has, found {len(first)}"
            raise ApiError(400, message, param="text_1")
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class ScoreEndpoints:
    """Scores pairs of texts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._frame: tuple[list[int], list[int]] | None = None  # tokens before and after a pair, once they are needed

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank. Returns documents in the order of their relevance for a query."""
        body = await self._service.body(request, RerankRequest)
        texts, documents = TextRequest(self._service, request, "rerank-"), body.texts
        scores = await self._scores(
            texts, request, body, [(body.query, document) for document in documents], "documents"
        )
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or len(scores)]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents:
            results = [one | {"document": {"text": documents[one["index"]]}} for one in results]
        shown = sum(len(documents[index]) for index in best) if body.return_documents else 0
        return await texts.answer({"id": texts.id, "results": results}, 4 * shown + _ENTRY * len(best))

    async def score(self, request: Request) -> Response:
        """POST /v1/score. Returns the score of each pair of texts."""
        body = await self._service.body(request, ScoreRequest)
        texts = TextRequest(self._service, request, "score-")
        scores = await self._scores(texts, request, body, body.pairs, "text_2")
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        answer = {"id": texts.id, "object": "list", "created": texts.created, "data": data}
        return await texts.answer(answer, _ENTRY * len(data))

    async def _scores(
        self, texts: TextRequest, request: Request, body: _Scoring, pairs: list[tuple[str, str]], param: str
    ) -> list[float]:
        pooling = self._service.settings.pooling
        assert pooling is not None
        limit = texts.limit(body.truncate_prompt_tokens)
        if pooling.task == "embed":
            if body.instruct is not None:
                raise ApiError(400, "instruct: expected none, because the model embeds texts", param="instruct")
            numbers = {
                text: number for number, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))
            }
            async with self._service.prompting(request):
                ids = await texts.tokens(list(numbers), param, limit=limit)
            vectors = await texts.values(ids, param)
            return [cosine(vectors[numbers[one]], vectors[numbers[other]]) for one, other in pairs]
        async with self._service.prompting(request):
            ids = await self._prompts(texts, body.instruct, pairs, limit or texts.context_length, param)
        scores = [float(value[0]) for value in await texts.values(ids, param)]
        return [_sigmoid(score) for score in scores] if body.use_activation else scores

    async def _prompts(
        self, texts: TextRequest, instruct: str | None, pairs: list[tuple[str, str]], limit: int, param: str
    ) -> list[list[int]]:
        """Return the prompts of pairs, of at most `limit` tokens: the documents are cut."""
        template, encode = self._service.settings.pairs, self._service.prompts.encode
        assert template is not None
        if self._frame is None:
            before, after = await encode([template.before, template.after], False, param)
            self._frame = before, after
        before, after = self._frame
        instruction = template.instruction if instruct is None else instruct

        def filled(query: str, document: str) -> str:
            return template.body.format(instruction=instruction, query=query, document=document)

        queries = {query: filled(query, "") for query, _ in pairs}
        bodies = [*queries.values(), *(filled(query, document) for query, document in pairs)]
        encoded = await encode(bodies, False, param, marks=False)
        room = limit - len(before) - len(after)
        for ids in encoded[: len(queries)]:
            if len(ids) >= room:
                message = (
                    f"{param}: expected a query and an instruction that leave room for a document, found {len(ids)} "
                    f"tokens of {room}"
                )
                raise ApiError(400, message, param=param, code="context_length_exceeded")
        return [[*before, *ids[:room], *after] for ids in encoded[len(queries) :]]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
