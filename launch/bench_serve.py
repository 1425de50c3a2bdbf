"""`tilerank bench serve`: a server under load, over HTTP, against its engine without one.

The same prompts go to an engine, as ids and all at once, and then, as text, to `tilerank serve` on loopback with the
same options. Whatever HTTP costs (parsing, tokenising, sockets, events, the cores that all of it takes from the ranks)
is the difference. First tokens are timed when their event has arrived, tokens are those that the server counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from tilerank.loader.tokenizer import Tokenizer

from . import bench_job
from .bench_job import EngineJob
from .bench_json import add_json_argument, check_json_argument, write_json
from .errors import LaunchError
from .process import die_with
from .start import whole_number

if TYPE_CHECKING:
    from tilerank.runtime.engine import Engine

    from .bench_job import RankMemory
    from .placement import Placement

TITLES = {
    "first_token_s": "first token, one stream",
    "one_tokens_per_s": "tokens/s, one stream",
    "all_tokens_per_s": "tokens/s, all streams",
    "new_prefix_s": "first token, a new prefix",
    "same_prefix_s": "first token, the same prefix again",
}
READY = re.compile(rb" is served at http://[^/]*:(\d+)/v1")
TAIL_TOKENS = 24  # of a prompt, after the beginning that it shares
END_S = 60.0


@dataclass(frozen=True)
class Answer:
    """Seconds from the moment that all prompts were handed over, to the first token and to the last; new tokens."""

    first_s: float
    last_s: float
    tokens: int


Ask = Callable[[Sequence[str], int], list[Answer]]
"""Has these prompts answered at the same time, with so many new tokens each."""

Figures = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_job.add_model_arguments(parser)
    _add_own_arguments(parser)
    bench_job.add_engine_arguments(parser)
    bench_job.add_arguments(parser)


def _add_own_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that `serve` does not have."""
    one = whole_number(1)
    parser.add_argument("--streams", type=one, default=16, metavar="N", help="at the same time (default: 16)")
    parser.add_argument("--prompt-tokens", type=one, default=128, metavar="N", help="of a prompt (default: 128)")
    parser.add_argument(
        "--new-tokens", type=whole_number(2), default=64, metavar="N", help="of an answer (default: 64)"
    )
    parser.add_argument(
        "--prefix-tokens", type=one, default=1000, metavar="N", help="that two prompts begin with (default: 1000)"
    )
    parser.add_argument("--repeat", type=one, default=3, metavar="N", help="runs; the median counts")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    if bench_job.is_rank(args):
        return bench_job.run_as_rank(args, _job(args))
    check_json_argument(args)
    _check_length(args)
    offline = bench_job.run_ranks(args, args.argv)
    own = argparse.ArgumentParser(add_help=False)
    _add_own_arguments(own)
    _, serve_argv = own.parse_known_args(args.argv[2:])  # without `bench serve`
    with _server([*serve_argv, "--max-total-tokens", str(cache_tokens(args))]) as port, asyncio.Runner() as runner:
        client = Client(port, runner)
        over_http = measure(client.ask, args)
        cpu_s = client.cpu_s_a_token
    rows = rows_of(offline, over_http)
    print(f"{args.model.name}: prompts of {args.prompt_tokens} tokens, {args.new_tokens} new ones, greedy")
    print("\n".join(table(rows)))
    print(
        f"with the same {args.prefix_tokens} tokens before it, a second prompt waits "
        f"{same_prefix_share(over_http):.1%} as long as the first"
    )
    print(f"the client that measured this took {1e6 * cpu_s:.0f} us of a core a token")
    write_json(args, {"rows": rows, "same_prefix_share": same_prefix_share(over_http), "client_cpu_s_a_token": cpu_s})
    return 0


def measure(ask: Ask, args: argparse.Namespace) -> Figures:
    """Medians, after a run that touches all code, and all memory of a cache of `cache_tokens`."""
    _measure_once(ask, args, seed=-1)
    runs = [_measure_once(ask, args, seed) for seed in range(args.repeat)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _measure_once(ask: Ask, args: argparse.Namespace, seed: int) -> Figures:
    """First tokens are those of answers that end there: of an answer that goes on, nothing is sent before its text is
    certain, which may need a second token."""
    draw = random.Random(seed)
    [first] = ask(prompts(draw, 1, args.prompt_tokens), 1)
    [one] = ask(prompts(draw, 1, args.prompt_tokens), args.new_tokens)
    many = ask(prompts(draw, args.streams, args.prompt_tokens), args.new_tokens)
    [begin] = prompts(draw, 1, args.prefix_tokens)
    new, again = (ask([f"{begin} {end}"], 1)[0] for end in prompts(draw, 2, TAIL_TOKENS))
    return {
        "first_token_s": first.first_s,
        "one_tokens_per_s": one.tokens / one.last_s,
        "all_tokens_per_s": sum(answer.tokens for answer in many) / max(answer.last_s for answer in many),
        "new_prefix_s": new.first_s,
        "same_prefix_s": again.first_s,
    }


def prompts(draw: random.Random, count: int, tokens: int) -> list[str]:
    """Random single letters, each of which is a token with the space before it in all vocabularies we know."""
    return [" ".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=tokens)) for _ in range(count)]


def rows_of(offline: Figures, over_http: Figures) -> list[dict[str, Any]]:
    return [
        {"what": name, "offline": offline[name], "http": over_http[name], "ratio": over_http[name] / offline[name]}
        for name in offline
    ]


def same_prefix_share(figures: Figures) -> float:
    return figures["same_prefix_s"] / figures["new_prefix_s"]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"{'':<36}{'offline':>12}{'HTTP':>12}{'HTTP is':>20}"]
    for row in rows:
        title, ours, theirs = TITLES[row["what"]], row["offline"], row["http"]
        if row["what"].endswith("_per_s"):
            lines.append(f"{title:<36}{ours:>12.1f}{theirs:>12.1f}{row['ratio']:>12.3f} of it")
        else:
            more = 1e3 * (theirs - ours)
            lines.append(f"{title:<36}{1e3 * ours:>9.1f} ms{1e3 * theirs:>9.1f} ms{more:>+12.1f} ms")
    return lines


def _check_length(args: argparse.Namespace) -> None:
    longest = max(args.prompt_tokens + args.new_tokens, args.prefix_tokens + TAIL_TOKENS + 1)
    limit = bench_job.model_config(args.model).max_position_embeddings
    if longest > limit:
        raise LaunchError(
            f"--prompt-tokens, --new-tokens and --prefix-tokens: expected at most {limit} positions, found {longest}"
        )


def cache_tokens(args: argparse.Namespace) -> int:
    """What the requests of a run need at most at a time, on both sides: pages that are touched for the first time would
    cost more than anything that is measured here."""
    page = 32  # kernels/attention.py: KV_BLOCK, which would bring torch along
    sequences = (args.streams, args.prompt_tokens + args.new_tokens), (2, args.prefix_tokens + TAIL_TOKENS)
    return int(max(count * (tokens + 2 * page) for count, tokens in sequences))


def _job(args: argparse.Namespace) -> EngineJob:
    def offline(engine: Engine, placement: Placement, ranks: list[RankMemory]) -> Figures:
        return measure(_asking(engine, Tokenizer(args.model)), args)

    return EngineJob(args, total_tokens=cache_tokens(args), measure=offline)


def _asking(engine: Engine, tokenizer: Tokenizer) -> Ask:
    """On rank 0."""
    from tilerank.runtime.engine import Request
    from tilerank.runtime.sampling import SamplingParams

    def ask(texts: Sequence[str], new_tokens: int) -> list[Answer]:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        times: list[list[float]] = [[] for _ in texts]
        for event in engine.generate([Request(tokenizer.encode(text), params) for text in texts]):
            times[event.request].append(event.time_s)
        return [Answer(seconds[0], seconds[-1], len(seconds)) for seconds in times]

    return ask


@contextlib.contextmanager
def _server(argv: Sequence[str]) -> Iterator[int]:
    """The port of a `tilerank serve` with these options. SystemExit with its status if it does not get ready: it has
    said why."""
    command = [sys.executable, "-P", "-m", "tilerank", "serve", *argv, "--port", "0"]
    dies = partial(die_with, os.getpid())
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=dies) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if ready := READY.search(line):
                    break
                sys.stderr.buffer.write(line)
            else:
                raise SystemExit(process.wait() or 1)
            threading.Thread(target=_relay, args=[process.stderr], daemon=True).start()
            port = int(ready[1])
            while not _healthy(port) and process.poll() is None:
                time.sleep(0.02)
            yield port
            process.send_signal(signal.SIGTERM)
            process.wait(END_S)
        finally:
            process.kill()


def _healthy(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200


def _relay(lines: IO[bytes]) -> None:
    for line in lines:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


class Client:
    """Streams over connections of its own, one each. It reads no more of an answer than it must: its work is done on
    the cores that it measures."""

    def __init__(self, port: int, runner: asyncio.Runner) -> None:
        self._port = port
        self._runner = runner
        self._cpu_s = 0.0
        self._tokens = 0

    @property
    def cpu_s_a_token(self) -> float:
        return self._cpu_s / self._tokens

    def ask(self, texts: Sequence[str], new_tokens: int) -> list[Answer]:
        began = time.process_time()
        answers = self._runner.run(self._ask(texts, new_tokens))
        self._cpu_s += time.process_time() - began
        self._tokens += sum(answer.tokens for answer in answers)
        return answers

    async def _ask(self, texts: Sequence[str], new_tokens: int) -> list[Answer]:
        connections = [await asyncio.open_connection("127.0.0.1", self._port) for _ in texts]
        requests = [_request(text, new_tokens) for text in texts]
        began = time.monotonic()
        return await asyncio.gather(
            *(_answer(*connection, one, began) for connection, one in zip(connections, requests, strict=True))
        )


def _request(text: str, new_tokens: int) -> bytes:
    body = json.dumps(
        {
            "prompt": text,
            "max_tokens": new_tokens,
            "temperature": 0,
            "repetition_penalty": 1,  # whatever the model advises: offline has none
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"
    return head.format(len(body)).encode() + body


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, began: float) -> Answer:
    writer.write(request)
    said = bytearray()
    first = last = None
    while piece := await reader.read(1 << 16):
        last = time.monotonic()
        said += piece
        if first is None and b"data: " in said:
            first = last
    writer.close()
    counted = re.search(rb'"completion_tokens":(\d+)', said)
    if first is None or last is None or counted is None or b"data: [DONE]" not in said:
        told = said[-300:].decode(errors="replace")
        raise LaunchError(f"the server was expected to stream an answer, but what it said ends in {told!r}")
    return Answer(first - began, last - began, int(counted[1]))
