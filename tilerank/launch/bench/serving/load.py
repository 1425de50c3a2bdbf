"""Requests that arrive at a server as a Poisson process, whether or not it has answered those before."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import Sequence
from math import ceil

from ...goodput.limits import Latency, Limits, percentiles
from ...goodput.mix import Mix, RequestSize, arrivals
from ...goodput.search import Trial
from ..media_inputs import Clip, MediumSize, kind_of, random_file
from .client import Overloaded, Stream, completion_request, random_text, streaming_request

CHECK_S = 0.1
"""How often a trial is checked for having failed."""
WARM_UP = 3
_TYPES = {"image": "image/jpeg", "audio": "audio/wav"}


def media_of(size: RequestSize) -> list[MediumSize]:
    """Return the sizes of a request's pictures and sounds."""
    return [*size.pictures, *map(Clip, size.sounds)]


def request_of(size: RequestSize, seed: str) -> bytes:
    """Return a request of this size, with random letters, pictures and sounds. LaunchError if Pillow is missing."""
    text = random_text(random.Random(seed), size.prompt_tokens)
    media = media_of(size)
    if not media:
        return completion_request(text, size.new_tokens)
    parts = [_part(medium, f"{seed} {number}") for number, medium in enumerate(media)]
    content = [*parts, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return streaming_request("/v1/chat/completions", {"messages": messages}, size.new_tokens)


def _part(medium: MediumSize, seed: str) -> dict[str, object]:
    kind, data = kind_of(medium), base64.b64encode(random_file(medium, seed)).decode()
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{_TYPES[kind]};base64,{data}"}}


class Load:
    """Runs trials on the server at `port`. A trial has at least `requests` requests and lasts at least `seconds`."""

    def __init__(
        self, port: int, runner: asyncio.Runner, mix: Mix, limits: Limits, *, requests: int, seconds: float
    ) -> None:
        self._port, self._runner = port, runner
        self._mix, self._limits = mix, limits
        self._requests, self._seconds = requests, seconds
        self._trials = 0

    def alone(self) -> Latency:
        """Send a few requests, one after the other, and return the waits of the one that was answered first after it
        was sent. Everything that was sent before has been answered then."""
        streams = [self._runner.run(self._send_now(size)) for size in self._mix.draw(WARM_UP, 0)]
        return min((_latency(stream, stream.start) for stream in streams), key=lambda latency: latency.ttft_s)

    def trial(self, rate: float) -> Trial:
        """Send requests at this rate, and give up once too many are late. Every trial has new prompts."""
        self._trials += 1
        count = max(self._requests, ceil(rate * self._seconds))
        sizes = self._mix.draw(count, 0)
        requests = [request_of(size, f"{self._trials} {number}") for number, size in enumerate(sizes)]
        result = self._runner.run(self._run(rate, requests, arrivals(rate, count, 1)))
        if result.given_up:
            self.alone()  # the server drops what was given up before the next trial begins
        return result

    async def _send_now(self, size: RequestSize) -> Stream:
        self._trials += 1
        stream = Stream(time.monotonic())
        await stream.read(self._port, request_of(size, f"{self._trials} alone"))
        return stream

    async def _run(self, rate: float, requests: Sequence[bytes], times: Sequence[float]) -> Trial:
        begin = time.monotonic() + CHECK_S
        streams = [Stream(begin + seconds) for seconds in times]
        pending = {asyncio.create_task(self._send(*each)) for each in zip(streams, requests, strict=True)}
        refused = False
        try:
            while pending and not refused and self._limits.hold(_waits(streams)):
                done, pending = await asyncio.wait(pending, timeout=CHECK_S)
                for task in done:
                    try:
                        task.result()
                    except Overloaded:
                        refused = True
        finally:
            given_up = refused or bool(pending)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        waits, seconds = _waits(streams), time.monotonic() - begin
        tokens = sum(stream.tokens or 0 for stream in streams)
        return Trial(rate, len(streams), waits, not given_up and self._limits.hold(waits), tokens / seconds, given_up)

    async def _send(self, stream: Stream, request: bytes) -> None:
        await asyncio.sleep(stream.start - time.monotonic())
        await stream.read(self._port, request)


def _waits(streams: Sequence[Stream]) -> Latency:
    """Return the percentiles of the waits so far."""
    now = time.monotonic()
    return percentiles([_latency(stream, now) for stream in streams])


def _latency(stream: Stream, now: float) -> Latency:
    """Return the waits of a request; of one that is not answered yet, what it has waited up to `now`."""
    ttft_s = max((now if stream.first is None else stream.first) - stream.start, 0.0)
    if stream.tokens is None or stream.first is None or stream.last is None:
        return Latency(ttft_s, 0.0)
    return Latency(ttft_s, (stream.last - stream.first) / max(stream.tokens - 1, 1))
