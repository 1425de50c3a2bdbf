"""The vectors of texts, in OpenAI's form."""

import base64
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ...chat.fields import ListOf, RequestBody
from ...chat.request import MAX_TOKENS, TokenId, TruncatedTokens
from ...http.errors import ApiError
from ..service import Service
from .texts import MAX_TEXTS, Text, TextRequest, Vector

_Ids = Annotated[ListOf[TokenId], Field(min_length=1, max_length=MAX_TOKENS)]
_FLOAT_BYTES = 20
"""Bytes of a number as JSON."""


class EmbeddingRequest(RequestBody):
    """POST /v1/embeddings. The fields after `dimensions` are not OpenAI's.

    truncate_prompt_tokens: texts are cut to so many tokens, or with -1 to the longest that the model takes; the tokens
    that the tokenizer appends stay. prompt_name: names a prompt of the model's files, which goes before each text.
    """

    model: str | None = Field(None, max_length=1024)
    input: (
        _Ids
        | Annotated[ListOf[_Ids], Field(min_length=1, max_length=MAX_TEXTS)]
        | Text
        | Annotated[ListOf[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    truncate_prompt_tokens: TruncatedTokens | None = None
    add_special_tokens: bool = True
    prompt_name: str | None = Field(None, max_length=1024)

    @property
    def texts(self) -> list[str | list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [[id for id in self.input if isinstance(id, int)]]
        return [one for one in self.input if not isinstance(one, int)]


class EmbeddingEndpoints:
    """Embeds texts."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embed(self, request: Request) -> Response:
        """POST /v1/embeddings. Returns a vector for each text, or for each list of token ids."""
        service = self._service
        body = await service.body(request, EmbeddingRequest, max_numbers=service.most_numbers(MAX_TEXTS))
        dimensions, prompt = self._dimensions(body.dimensions), self._prompt(body.prompt_name)
        texts = TextRequest(service, request, "embd-")
        given = body.texts
        async with service.prompting(request):
            plain = [prompt + one for one in given if isinstance(one, str)]
            limit = texts.limit(body.truncate_prompt_tokens)
            encoded = await texts.tokens(plain, "input", limit=limit, special=body.add_special_tokens)
        tokens = iter(encoded)
        ids = [(one if limit is None else one[:limit]) if isinstance(one, list) else next(tokens) for one in given]
        vectors = await texts.values(ids, "input", dimensions)
        is_text = body.encoding_format == "base64"
        nbytes = sum(len(vector) for vector in vectors) * (6 if is_text else _FLOAT_BYTES)
        data = [_entry(number, vector, is_text) for number, vector in enumerate(vectors)]
        answer = {"object": "list", "id": texts.id, "created": texts.created, "data": data}
        return await texts.answer(answer, nbytes)

    def _dimensions(self, wanted: int | None) -> int:
        """Return how many numbers of each vector are wanted, 0 for all. Raises ApiError for a number that the model
        does not have."""
        pooling = self._service.settings.pooling
        assert pooling is not None
        if wanted is None:
            return 0
        if pooling.dimensions and wanted not in pooling.dimensions:
            expected = "one of " + ", ".join(map(str, pooling.dimensions))
        elif wanted > pooling.width:
            expected = f"at most {pooling.width}"
        else:
            return wanted
        raise ApiError(400, f"dimensions: expected {expected}, found {wanted}", param="dimensions")

    def _prompt(self, name: str | None) -> str:
        """Return what goes before each text. Raises ApiError for a name that the model's files do not have."""
        pooling = self._service.settings.pooling
        assert pooling is not None
        prompts, name = pooling.prompts or {}, name or pooling.default_prompt
        if name is not None and name not in prompts:
            expected = "one of " + ", ".join(prompts) if prompts else "none, because the model's files have no prompts"
            raise ApiError(400, f"prompt_name: expected {expected}, found {name!r}", param="prompt_name")
        return prompts[name] if name is not None else ""


def _entry(number: int, vector: Vector, is_text: bool) -> dict[str, Any]:
    values = base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
    return {"object": "embedding", "index": number, "embedding": values}
