"""`LLM`: a model in Python, with the methods and the names of vLLM's class of this name."""

from __future__ import annotations

import base64
import json
import os
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np
import pydantic

from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.params import SamplingParams as EngineParams
from tilerank.runtime.server.apis.completions.body import Completion
from tilerank.runtime.server.apis.service import Service
from tilerank.runtime.server.chat.generation import Generation, api_errors
from tilerank.runtime.server.chat.request import ChatCompletion, Sampling
from tilerank.runtime.server.http.body import validation_error

from ..cli import parse_command
from ..commands import engine as engine_command
from ..offline.engine import OfflineEngine
from ..offline.post import api_error, post
from ..offline.progress import Progress
from ..options.arguments import as_arguments
from .outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    HiddenStatesOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    collect,
    collect_hidden_states,
)
from .sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": TEXT} or {"prompt_token_ids": IDS}."""
Messages = Sequence[Mapping[str, Any]]
TEXTS = 32
"""Texts or pairs of a request for vectors or scores: several, so that a text which is in many pairs is read once."""
B = TypeVar("B", bound=Sampling)


class LLM:
    """A model on ranks that run until `close`, the end of a `with`, or the end of this process.

    model: a directory, a GGUF file, or an id on the hub. options: those of `tilerank engine --help`, with _ in place of
    -, such as tp=2, max_model_len=4096 or quantization="int4".

    Under torchrun, mpirun and srun every process makes the same LLM. The script goes on in the process of rank 0; the
    others end with it, inside of this call. Raises LaunchError, ConfigError or EngineError if the model cannot run.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        _, args = parse_command(["engine", os.fspath(model), *_arguments({"log_level": "warning"} | options)])
        if engine_command.is_rank(args):
            raise SystemExit(engine_command.run(args))
        engine_command.check_model(args)
        self._engine = OfflineEngine(args)
        self._close = weakref.finalize(self, self._engine.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks."""
        self._close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt. Returns an output for each, in their order.

        sampling_params: for all prompts, or one for each. Raises RequestError for a prompt that cannot run, and then
        the others are cancelled.
        """
        given = _several(prompts)

        def body(i: int, params: SamplingParams) -> Completion:
            return _checked(Completion, {"prompt": _prompt(given[i]), **params.fields()})

        async def generation(service: Service, body: Completion) -> Generation:
            grammar = await service.grammar(body)
            return await service.generation_of(body, await service.prompts.from_texts(body.prompt), grammar)

        return self._answers(len(given), sampling_params, body, generation, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several. As `generate`.

        fields: more of a request to /v1/chat/completions (docs/requests.md), such as tools, chat_template_kwargs or
        continue_final_message.
        """
        given = [messages] if isinstance(messages[0], Mapping) else list(messages)

        def body(i: int, params: SamplingParams) -> ChatCompletion:
            return _checked(ChatCompletion, {"messages": list(given[i]), **params.chat_fields(), **fields})

        async def generation(service: Service, body: ChatCompletion) -> Generation:
            with service.budget.share() as share:
                return await service.generation(body, share)

        return self._answers(len(given), sampling_params, body, generation, use_tqdm)

    def embed(
        self, texts: str | Sequence[str], *, dimensions: int | None = None, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each text, for a model that embeds. dimensions: as /v1/embeddings takes them."""
        given = [texts] if isinstance(texts, str) else list(texts)
        fields = {"encoding_format": "base64", "dimensions": dimensions}
        bodies = [{"input": given[i : i + TEXTS], **fields} for i in range(0, len(given), TEXTS)]
        found = self._posted("/v1/embeddings", bodies, len(given), use_tqdm)
        vectors = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() for one in found]
        return [EmbeddingRequestOutput(EmbeddingOutput(vector)) for vector in vectors]

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, use_tqdm: bool = True, **fields: Any
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair of texts: one text with each of several, or as many pairs as both lists are
        long. fields: more of a request to /v1/score, such as instruct."""
        first, second = ([one] if isinstance(one, str) else list(one) for one in (text_1, text_2))
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise RequestError(f"text_1: expected one text or {len(second)}, as text_2 has, found {len(first)}")
        parts = [slice(i, i + TEXTS) for i in range(0, len(first), TEXTS)]
        bodies = [{"text_1": first[part], "text_2": second[part], **fields} for part in parts]
        found = self._posted("/v1/score", bodies, len(first), use_tqdm)
        return [ScoringRequestOutput(ScoringOutput(one["score"])) for one in found]

    def hidden_states(
        self, prompts: Prompt | Sequence[Prompt], layers: Sequence[int] = (-1,), *, use_tqdm: bool = True
    ) -> list[HiddenStatesOutput]:
        """Return the hidden states of the tokens of each prompt after some layers, numbered as `hidden_states` of
        transformers: 0 has the embeddings, and the last one, which is -1 as well, the states after the last norm."""
        given = _several(prompts)
        params = EngineParams(max_new_tokens=0, hidden_layers=tuple(layers))
        service: Service = self._engine.app.state.service
        found: dict[int, HiddenStatesOutput] = {}

        async def read(i: int) -> None:
            body = _checked(Completion, {"prompt": _prompt(given[i])})
            (prompt,) = await service.prompts.from_texts(body.prompt)
            with api_errors():
                found[i] = await collect_hidden_states(self._engine.client.generate(prompt, params), prompt, layers)
            progress.add(len(prompt.token_ids))

        with Progress(len(given), "prompts", shown=use_tqdm) as progress:
            self._engine.run(range(len(given)), read, progress.show)
        return [found[i] for i in range(len(given))]

    def _answers(
        self,
        count: int,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        body: Callable[[int, SamplingParams], B],
        generation: Callable[[Service, B], Awaitable[Generation]],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Run `count` requests. body: makes the body of one. generation: makes its generation."""
        given = sampling_params or SamplingParams()
        params = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(params) != count:
            raise RequestError(f"sampling_params: expected one or {count}, as many as prompts, found {len(params)}")
        service: Service = self._engine.app.state.service
        found: dict[int, RequestOutput] = {}

        async def answer(i: int) -> None:
            request = body(i, params[i])
            text = request.prompt_text(0)
            running = await generation(service, request)
            found[i] = await collect(running, text)
            progress.add(running.usage.completion_tokens)

        with Progress(count, "prompts", shown=use_tqdm) as progress:
            self._engine.run(range(count), answer, progress.show)
        return [found[i] for i in range(count)]

    def _posted(self, path: str, bodies: Sequence[dict[str, Any]], count: int, use_tqdm: bool) -> list[dict[str, Any]]:
        """Return the entries of the answers to requests with these bodies, `count` together."""
        found: dict[int, list[dict[str, Any]]] = {}

        async def send(i: int) -> None:
            status, data = await post(self._engine.app, path, json.dumps(bodies[i]).encode())
            answer = json.loads(data)
            if status != 200:
                raise api_error(status, answer)
            found[i] = answer["data"]
            progress.add(answer["usage"]["total_tokens"], len(found[i]))

        with Progress(count, "texts", shown=use_tqdm) as progress:
            self._engine.run(range(len(bodies)), send, progress.show)
        return [entry for i in range(len(bodies)) for entry in found[i]]


def _arguments(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the command line of options. Raises LaunchError for values that no option has."""
    for name, value in options.items():
        text = json.dumps(value) if isinstance(value, dict) else value
        yield from as_arguments("LLM", name, os.fspath(text) if isinstance(text, os.PathLike) else text)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts, of which there may be one alone."""
    is_one = isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int))
    return cast(list[Prompt], [prompts] if is_one else list(prompts))


def _prompt(given: Prompt) -> str | list[int]:
    """Return a text or token ids. Raises RequestError for something else."""
    if isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        return list(given)
    value = given.get("prompt_token_ids", given.get("prompt"))
    if value is None or given.keys() - {"prompt", "prompt_token_ids"}:
        names = ", ".join(given)
        raise RequestError(f"expected a prompt with prompt or prompt_token_ids, found {names}; `chat` takes media")
    return value if isinstance(value, str) else list(value)


def _checked(kind: type[B], fields: dict[str, Any]) -> B:
    """Return the body of a request. Raises ApiError."""
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as e:
        raise validation_error(fields, e) from e
