"""A client that streams answers of a server on loopback, over one connection each.

It parses as little of the responses as possible, since it runs on the cores that it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...errors import LaunchError


class Overloaded(LaunchError):
    """The server has refused a request, because it holds too many."""


@dataclass
class Stream:
    """A streamed answer, and when it arrived. Times are of time.monotonic().

    start: from when on its times count. first, last: of the first event and of the last bytes; None before. tokens: of
    the answer, as the server counts them; None before it is complete.
    """

    start: float
    first: float | None = None
    last: float | None = None
    tokens: int | None = None

    @property
    def first_s(self) -> float:
        assert self.first is not None
        return self.first - self.start

    @property
    def last_s(self) -> float:
        assert self.last is not None
        return self.last - self.start

    async def read(self, port: int, request: bytes) -> None:
        """Connect, send a request and read its answer. LaunchError if the stream is incomplete."""
        await self.read_from(await asyncio.open_connection("127.0.0.1", port), request)

    async def read_from(self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> None:
        """The same over a connection that is open. It is closed in the end."""
        reader, writer = connection
        received = bytearray()
        try:
            writer.write(request)
            while chunk := await reader.read(1 << 16):
                self.last = time.monotonic()
                received += chunk
                if self.first is None and b"data: " in received:
                    self.first = self.last
        finally:
            writer.close()
        if received.startswith(b"HTTP/1.1 503"):
            raise Overloaded("the server's response: expected a stream, found status 503, the server is overloaded")
        usage = re.search(rb'"completion_tokens":(\d+)', received)
        if self.first is None or usage is None or b"data: [DONE]" not in received:
            tail = received[-300:].decode(errors="replace")
            raise LaunchError(f"the server's response: expected a complete stream, found one that ends in {tail!r}")
        self.tokens = int(usage[1])


def streaming_request(path: str, content: dict[str, Any], new_tokens: int) -> bytes:
    """Return a request of an answer of exactly `new_tokens` tokens. content: the prompt or the messages."""
    body = json.dumps(
        {
            **content,
            "max_tokens": new_tokens,
            "temperature": 0,
            "repetition_penalty": 1,  # as offline; the model's generation_config.json may have another default
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def completion_request(text: str, new_tokens: int) -> bytes:
    """Return a request to complete a text."""
    return streaming_request("/v1/completions", {"prompt": text}, new_tokens)


def port_of(address: str) -> int:
    """Return the port of a server, once it is healthy."""
    port = urlsplit(address).port
    assert port is not None
    while not _healthy(port):
        time.sleep(0.02)
    return port


def _healthy(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200


def random_text(rng: random.Random, tokens: int) -> str:
    """Return random letters; a space and a letter are one token in common vocabularies."""
    return " ".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=tokens))
