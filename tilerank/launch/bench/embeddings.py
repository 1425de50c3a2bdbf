"""The part of `tilerank bench serve` for models that embed texts: all texts at the same time, a request each."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilerank.loader.tokenizer import Tokenizer

from ..errors import LaunchError

if TYPE_CHECKING:
    from tilerank.runtime.lead.engine import Engine

TITLES = {
    "one_text_s": "vector of one text",
    "texts_tokens_per_s": "tokens/s, all texts",
}

Embed = Callable[[Sequence[str]], float]
"""Embeds texts at the same time and returns the seconds until the last vector is there."""


def texts_of(args: argparse.Namespace, seed: int) -> list[list[str]]:
    """Return the batches of a run: one text, and `--streams` texts, of `--prompt-tokens` random letters each."""
    rng = random.Random(seed)
    return [
        [" ".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=args.prompt_tokens)) for _ in range(count)]
        for count in (1, args.streams)
    ]


def measure(embed: Embed, args: argparse.Namespace) -> dict[str, float]:
    """Return the medians of `--repeat` runs, after a warm-up, by the keys of TITLES."""
    runs = [[embed(batch) for batch in texts_of(args, seed)] for seed in range(-1, args.repeat)][1:]
    return metrics_of(args, runs)


def metrics_of(args: argparse.Namespace, runs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the metrics of runs, given the seconds of their two batches."""
    one, every = (statistics.median(seconds) for seconds in zip(*runs, strict=True))
    return {"one_text_s": one, "texts_tokens_per_s": args.streams * args.prompt_tokens / every}


def embed_with(engine: Engine, tokenizer: Tokenizer) -> Embed:
    """Return what embeds texts with the engine, without a server. Runs on rank 0."""
    from tilerank.runtime.lead.engine import Request
    from tilerank.runtime.lead.sampling import SamplingParams
    from tilerank.runtime.protocol.params import PoolingParams
    from tilerank.runtime.protocol.prompt import Prompt

    params = SamplingParams(max_new_tokens=0, pooling=PoolingParams())

    def embed(texts: Sequence[str]) -> float:
        began = time.monotonic()
        for text in texts:
            engine.submit(Request(Prompt(tokenizer.encode(text)), params))
        while engine.busy:
            engine.step()
        return time.monotonic() - began

    return embed


def embed_over_http(port: int, runner: asyncio.Runner) -> Embed:
    """Return what embeds texts with a server on loopback, over one connection each."""

    async def ask(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> None:
        reader, writer = connection
        writer.write(request)
        answer = await reader.read()
        writer.close()
        if b'"embedding"' not in answer:
            tail = answer[-300:].decode(errors="replace")
            raise LaunchError(f"the server's response: expected an embedding, found one that ends in {tail!r}")

    async def ask_all(texts: Sequence[str]) -> float:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in texts]
        began = time.monotonic()
        await asyncio.gather(*map(ask, connections, map(_request, texts)))
        return time.monotonic() - began

    return lambda texts: runner.run(ask_all(texts))


def _request(text: str) -> bytes:
    body = json.dumps({"input": text, "encoding_format": "base64"}).encode()  # as OpenAI's clients ask
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
